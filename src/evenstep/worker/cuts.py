"""Is what a batch gives the mean of what its parts give? What a loss is a mean over, found by cutting a batch up.

At the start every token of a language model has nearly the same loss, so that a mean over tokens cannot be told from a
mean over samples by the loss alone. Gradients differ from the first step on: they are held to the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

Kind = Literal["sound", "sum", "weighted", "mixed"]
Parts = tuple[int, ...]
SUBSETS: tuple[Parts, ...] = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
TOGETHER = SUBSETS[3:]
WHOLE = SUBSETS[-1]


@dataclass(frozen=True)
class Given:
    """What some of the parts give together."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    """Flat, in float64, by parameter; one that is not there is zero."""


@dataclass(frozen=True)
class Rounding:
    """How far loss and gradients may be off."""

    loss: float
    """Relative to the largest loss."""
    gradient: float
    """Relative to the gradient's largest element."""
    floor: float
    """No gradient is taken to be smaller than this part of the largest one."""
    moved_loss: float = 0.0
    moved: Mapping[str, float] = field(default_factory=dict)
    """What the loss and each gradient may be off at least, in their own units."""


@dataclass(frozen=True)
class CutUp:
    """What became of it."""

    kind: Kind
    """sound: a mean over samples. sum: a sum over samples. weighted: a mean over something else, of which each part
    holds its own number. mixed: a sample's value depends on which others are there."""
    whole: float
    by_parts: float
    """The mean of the losses of the parts, each weighed by its samples."""
    factor: float = 1.0
    """Of a weighted one: how many times as much as its samples the part weighs that is furthest off."""
    unlike: tuple[str, ...] = ()
    """Gradients that do not add up where the loss does, the one that is furthest off first."""


Values = dict[Parts, torch.Tensor]
Combine = Callable[[Sequence[int], Sequence[torch.Tensor]], torch.Tensor]


def cut_up(given: Mapping[Parts, Given], sizes: Sequence[int], rounding: Rounding) -> CutUp:
    """Compare what SUBSETS of three parts give, in the units of what each number may be off."""
    names = list(dict.fromkeys(name for one in given.values() for name in one.gradients))
    columns = _in_units(given, names, rounding)
    values: Values = {chosen: torch.cat(columns[chosen]) for chosen in SUBSETS}
    whole, alone = given[WHOLE].loss, [given[part,].loss for part in range(3)]
    by_parts = sum(size * one for size, one in zip(sizes, alone, strict=True)) / sum(sizes)
    if _misfit(values, _mean_by(sizes)) <= 1:
        return CutUp("sound", whole, by_parts)
    if _misfit(values, _sum) <= 1:
        return CutUp("sum", whole, by_parts)
    weights = _fitted(values)
    if all(weight > 0 for weight in weights) and _misfit(values, _mean_by(weights)) <= 1:
        factors = [weight / sum(weights) / (size / sum(sizes)) for weight, size in zip(weights, sizes, strict=True)]
        return CutUp("weighted", whole, by_parts, max(factors, key=lambda factor: abs(math.log(factor))))
    losses = {chosen: columns[chosen][0] for chosen in SUBSETS}
    if _misfit(losses, _mean_by(sizes)) <= 1:
        return CutUp("sound", whole, by_parts, unlike=_unlike(columns, names, _mean_by(sizes)))
    if _misfit(losses, _sum) <= 1:
        return CutUp("sum", whole, by_parts, unlike=_unlike(columns, names, _sum))
    return CutUp("mixed", whole, by_parts)


def _unlike(columns: Mapping[Parts, Sequence[torch.Tensor]], names: Sequence[str], combine: Combine) -> tuple[str, ...]:
    """Gradients that do not add up; the one that is furthest off first."""
    off = {
        name: _misfit({chosen: columns[chosen][place] for chosen in SUBSETS}, combine)
        for place, name in enumerate(names, 1)
    }
    return tuple(sorted((name for name in names if off[name] > 1), key=lambda name: -off[name]))


def _in_units(
    given: Mapping[Parts, Given], names: Sequence[str], rounding: Rounding
) -> dict[Parts, list[torch.Tensor]]:
    """The loss and then every gradient, divided by what it may be off."""
    most = {name: max(_largest(one.gradients.get(name)) for one in given.values()) for name in names}
    largest = max(most.values(), default=0.0)
    units = {
        name: max(rounding.gradient * max(most[name], rounding.floor * largest), rounding.moved.get(name, 0.0), 1e-300)
        for name in names
    }
    scale = max(abs(one.loss) for one in given.values())
    of_loss = max(rounding.loss * scale, rounding.moved_loss, 1e-300)
    known = {name: gradient for one in given.values() for name, gradient in one.gradients.items()}
    zeros = {name: torch.zeros_like(known[name]) for name in names}
    return {
        chosen: [
            torch.tensor([one.loss / of_loss], dtype=torch.float64),
            *(one.gradients.get(name, zeros[name]) / units[name] for name in names),
        ]
        for chosen, one in given.items()
    }


def _largest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())


def _mean_by(weights: Sequence[float]) -> Combine:
    def mean(chosen: Sequence[int], alone: Sequence[torch.Tensor]) -> torch.Tensor:
        total = sum(weights[part] for part in chosen)
        return torch.stack([weights[part] / total * alone[part] for part in chosen]).sum(0)

    return mean


def _sum(chosen: Sequence[int], alone: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([alone[part] for part in chosen]).sum(0)


def _misfit(values: Values, combine: Combine) -> float:
    """How far the parts, put together, are at most from what they give together; no number is too far."""
    alone = [values[part,] for part in range(3)]
    off = [float((values[chosen] - combine(chosen, alone)).abs().max()) for chosen in TOGETHER]
    return max(off) if all(map(math.isfinite, off)) else math.inf


def _fitted(values: Values) -> list[float]:
    """The weights with which the parts come closest: sum of w_i (together - part_i) is zero for all that are together.

    The least eigenvector of the squares of these equations; all of one sign, or it is no mean.
    """
    squares = torch.zeros(3, 3, dtype=torch.float64)
    for chosen in TOGETHER:
        together = values[chosen]
        rows = [together - values[part,] if part in chosen else torch.zeros_like(together) for part in range(3)]
        squares += torch.stack(rows) @ torch.stack(rows).T
    if not bool(squares.isfinite().all()):
        return [0.0] * 3
    least = torch.linalg.eigh(squares).eigenvectors[:, 0]
    return [float(weight) for weight in least / least.sum()]
