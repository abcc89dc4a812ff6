"""Stretches of time, and sums of them: what lies in one set of stretches and not in another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Span = tuple[float, float]
"""Begin and end, in whatever unit both have."""


def span_of(event: Mapping[str, Any]) -> Span:
    """When an event of a trace began and ended."""
    return event["ts"], event["ts"] + event["dur"]


def union(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """The same time as stretches that do not overlap, in order; those no more than `gap` apart become one."""
    joined: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and begin <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The time that lies in both; each is what `union` returned."""
    found: list[Span] = []
    here = there = 0
    while here < len(some) and there < len(others):
        begin, end = max(some[here][0], others[there][0]), min(some[here][1], others[there][1])
        if begin < end:
            found.append((begin, end))
        if some[here][1] < others[there][1]:
            here += 1
        else:
            there += 1
    return found


def without(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The time that lies in the first and not in the second; each is what `union` returned."""
    if not some:
        return []
    ends = [some[0][0], *(edge for span in others for edge in span), max(some[-1][1], some[0][0])]
    between = [(ends[index], ends[index + 1]) for index in range(0, len(ends), 2)]
    return common(some, [span for span in between if span[0] < span[1]])


def length(spans: Iterable[Span]) -> float:
    """How much time that is, of stretches that do not overlap."""
    return sum(end - begin for begin, end in spans)


def holds(spans: Sequence[Span], begin: float, end: float) -> bool:
    """Whether one of them has all of that stretch, or moment, in it; they are what `union` returned."""
    place = bisect_right(spans, (begin, float("inf"))) - 1
    return place >= 0 and begin < spans[place][1] and end <= spans[place][1]
