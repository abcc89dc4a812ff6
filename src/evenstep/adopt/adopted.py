"""What adopted tasks have in common: the original that they are compared with, its model and its optimizer."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from evenstep.strategies.base import copied
from evenstep.task import Task

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of a training: the loss of each, and the weights after the last."""

    losses: list[float]
    weights: Mapping[str, torch.Tensor]


class Original(Protocol):
    """The trainer that a task was made of."""

    name: str

    def first_steps(self, num: int, task: Task, seed: Callable[[int], None]) -> FirstSteps:
        """Train for `num` steps, as it does; `seed(step)` is called before each, from 0."""


@dataclass(frozen=True)
class AdoptedTask(Task):
    """A task that knows what it was made of."""

    original: Original | None = None
    left_out: tuple[str, ...] = ()
    """What the original does and this task does not, and what to use instead: one line for each."""


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process looks like the only one: libraries that read the rank would start a process group."""
    taken = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)


class ModelCopies:
    """Makes the model of a task: a copy of the original's, on the CPU, for each training."""

    def __init__(self, model: nn.Module, prepare: Callable[[nn.Module], None] = lambda model: None) -> None:
        self.model = model.cpu()
        self._prepare = prepare

    def __call__(self) -> nn.Module:
        model = copied(self.model)
        self._prepare(model)
        return model


def moved(
    optimizer: torch.optim.Optimizer, before: Iterable[nn.Parameter], after: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same new optimizer, with all its groups and options, over other parameters."""
    parameters = list(after)
    memo = {id(old): new for old, new in zip(before, parameters, strict=True)}
    return rounding_as_is(copy.deepcopy(optimizer, memo), parameters)


def rounding_as_is(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Mark an optimizer: no fused kernel, and gradients are clipped in the order of the model, as its original does."""
    optimizer.keeps_kernel = True  # type: ignore[attr-defined]
    optimizer.in_order_of_model = parameters  # type: ignore[attr-defined]
    return optimizer
