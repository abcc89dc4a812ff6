"""Calling a loss on one seat: the right device, the trained model through its engine, the others frozen beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from evenstep.task import Amount
from evenstep.worker.spread import Spread

T = TypeVar("T")


class Frozen:
    """Inside, these models get no gradients of their own, but let them through."""

    def __init__(self, models: Sequence[Spread]) -> None:
        self._weights = [
            weight for model in models for seat in model.bounds for weight in seat.parameters() if weight.requires_grad
        ]

    def __enter__(self) -> None:
        for weight in self._weights:
            weight.requires_grad_(False)

    def __exit__(self, *error: object) -> None:
        for weight in self._weights:
            weight.requires_grad_(True)


def call(models: tuple[Spread, ...], place: int, loss: Callable[..., Amount], data: Any) -> Amount:
    """`loss` of the models on one seat: the trained one through the engine's wrapper, the others directly."""
    trained, *others = models
    if not others:
        return trained.seats[place](loss, data)  # type: ignore[no-any-return]

    def inner(*bare: Any) -> Amount:
        return loss(bare, data)

    for other in reversed(others):
        inner = _inside(other.bounds[place], inner)
    return trained.seats[place](inner)  # type: ignore[no-any-return]


def _inside(bound: nn.Module, inner: Callable[..., Amount]) -> Callable[..., Amount]:
    return lambda *bare: bound(lambda model: inner(*bare, model))


def one_by_one(work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    """`work` of one seat after the other, in this thread."""
    return [work(*seat_arguments) for seat_arguments in arguments]


NOTHING: AbstractContextManager[None] = nullcontext()
"""Around what needs nothing around it; made once, for a step enters several."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, `device` is current in this thread: CUDA keeps that per thread."""
    return torch.cuda.device(device) if device.type == "cuda" else NOTHING
