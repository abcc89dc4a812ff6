"""Is a value of a batch the sum of what its parts give? What a loss is a mean over, found by cutting a batch up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["sound", "sum", "weighted", "mixed"]
Value = Callable[[Sequence[int]], float]
"""The mean of a value over some of the parts, named by their numbers."""


@dataclass(frozen=True)
class CutUp:
    """What became of it."""

    kind: Kind
    """sound: a mean over samples. sum: a sum over samples. weighted: a mean over something else, of which each part
    holds its own number. mixed: a sample's value depends on which others are there."""
    whole: float
    by_parts: float
    """The mean of the parts, each weighed by its samples."""
    factor: float = 1.0
    """Of a weighted one: how many times as much as its samples the part weighs that is furthest off."""


def cut_up(value: Value, sizes: Sequence[int], tolerance: float) -> CutUp:
    """Compute the value of three parts, of their pairs, and of all."""
    alone = [value([part]) for part in range(3)]
    whole = value([0, 1, 2])
    by_parts = sum(size * one for size, one in zip(sizes, alone, strict=True)) / sum(sizes)
    scale = max(abs(whole), *map(abs, alone), 1e-300)

    def is_near(one: float, other: float) -> bool:
        return abs(one - other) <= tolerance * scale

    if is_near(whole, by_parts):
        return CutUp("sound", whole, by_parts)
    if is_near(whole, sum(alone)):
        return CutUp("sum", whole, by_parts)
    pairs = {(one, other): value([one, other]) for one, other in ((0, 1), (0, 2), (1, 2))}
    weights = [1.0, *(_weight(alone[0], alone[other], pairs[0, other]) for other in (1, 2))]
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        return CutUp("mixed", whole, by_parts)
    predicted = sum(weight * one for weight, one in zip(weights, alone, strict=True)) / sum(weights)
    last = (weights[1] * alone[1] + weights[2] * alone[2]) / (weights[1] + weights[2])
    # Dividing by differences of losses costs some digits.
    loose = max(1e3 * tolerance, 1e-7)
    if abs(predicted - whole) <= loose * scale and abs(last - pairs[1, 2]) <= loose * scale:
        factors = [weight / sum(weights) / (size / sum(sizes)) for weight, size in zip(weights, sizes, strict=True)]
        return CutUp("weighted", whole, by_parts, max(factors, key=lambda factor: abs(math.log(factor))))
    return CutUp("mixed", whole, by_parts)


def _weight(first: float, other: float, both: float) -> float:
    """How many times as much as the first part the other one weighs in what both give together."""
    return (both - first) / (other - both) if other != both else math.inf
