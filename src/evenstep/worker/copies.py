"""Copies of a model, and whether one still holds what the other does."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

SMALL_ENOUGH = 20_000_000
"""Parameters up to which something is tried on a copy of a model."""

M = TypeVar("M", bound=nn.Module)


def copied(model: M, memo: dict[int, Any] | None = None) -> M:
    """A deep copy, in which whatever `memo` names by its id is taken as already copied.

    A layer may keep a tensor that it computes from its parameters before each forward, as the older
    `torch.nn.utils.weight_norm` does. torch refuses to copy such a tensor; here its values are.
    """
    computed = [
        value
        for layer in model.modules()
        for value in vars(layer).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    return copy.deepcopy(model, {**{id(one): one.detach().clone() for one in computed}, **(memo or {})})


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same; no number in the same place of both is the same."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
