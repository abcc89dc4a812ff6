"""Which blocks each stage of a pipeline gets, so that all take as long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def block_costs(
    sizes: Sequence[float], seconds: Sequence[float], before: float = 0.0, behind: float = 0.0
) -> list[float]:
    """By what a model is cut: the share of each block in the parameters, and in the seconds of all.

    `before` and `behind` are the parameters that are used before the first block and behind the last one.
    """
    total, of_all = max(1.0, sum(sizes) + before + behind), max(1e-9, sum(seconds))
    costs = [size / total + one / of_all for size, one in zip(sizes, seconds, strict=True)]
    costs[0] += before / total
    costs[-1] += behind / total
    return costs


def balanced(costs: Sequence[float], num: int) -> list[int]:
    """The stage of each block: consecutive blocks, of which the most expensive stage is as cheap as possible.

    >>> balanced([1, 1, 1, 1, 4], 2), balanced([1, 1, 1], 3)
    ([0, 0, 0, 0, 1], [0, 1, 2])
    """
    total = [0.0, *accumulate(costs)]
    # For each number of blocks: the cost of its most expensive stage, and where stages begin.
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (total[end], ()) for end in range(1, len(total))}
    for _ in range(num - 1):
        best = {
            end: min((max(most, total[end] - total[start]), (*starts, start)) for start, (most, starts) in found)
            for end in range(1, len(total))
            if (found := [(start, one) for start, one in best.items() if start < end])
        }
    _, starts = best[len(costs)]
    return [sum(index >= start for start in starts) for index in range(len(costs))]
