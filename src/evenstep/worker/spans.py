"""From moments at which something began to spans, and from spans to the parts of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from evenstep.record import PARTS, Lane, Timeline

Span = tuple[str, float, float]
"""Name, begin and end; in seconds."""
STEP = "input"
"""What every step begins with."""
_PART_OF = {"replicate": "communication", "reduce": "communication"}


@dataclass(frozen=True)
class Noted:
    """What one rank noted of some steps: every lane's spans, one after another."""

    host: list[Span]
    seats: dict[str, list[Span]]
    """Of the devices, where one process drives several."""
    network: list[Span]

    def to_json(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {"host": self.host, "seats": self.seats, "network": self.network}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Noted:
        """What `to_json` wrote, perhaps on another rank."""
        seats = {name: _spans(spans) for name, spans in values["seats"].items()}
        return cls(_spans(values["host"]), seats, _spans(values["network"]))

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Begin and end of each step."""
        begins = [begin for name, begin, _ in self.host if name == STEP]
        return list(zip(begins, [*begins[1:], self.host[-1][2]], strict=True)) if begins else []

    def parts(self, begin: float, end: float) -> dict[str, float]:
        """Seconds of this time in each part of a step; they add up to all of it."""
        found = dict.fromkeys(PARTS, 0.0)
        for name, since, until in within(self.host, begin, end):
            found[_PART_OF.get(name, name)] += until - since
        if self.seats:
            # While its devices compute, the host waits: how that time divides, they know.
            seconds = _seconds_by_name(span for seat in self.seats.values() for span in within(seat, begin, end))
            computing = found["forward"] + found["backward"]
            forward, backward = seconds.get("forward", 0.0), seconds.get("backward", 0.0)
            found["forward"] = computing * forward / (forward + backward or 1.0)
            found["backward"] = computing - found["forward"]
        return found

    def lanes(self, rank: int, begin: float, end: float, since: float) -> list[Lane]:
        """What is to be seen of this time, counted from `since`."""
        every = {"host": self.host, **self.seats, "network": self.network}
        shown = {name: within(spans, begin, end) for name, spans in every.items()}
        return [
            Lane(rank=rank, name=name, spans=[(what, first - since, last - since) for what, first, last in spans])
            for name, spans in shown.items()
            if spans
        ]


def spans_of(marks: Sequence[tuple[str, float]]) -> list[Span]:
    """Each lasts until another one begins; the last one only ends the one before."""
    marks = [mark for index, mark in enumerate(marks) if index == 0 or mark[0] != marks[index - 1][0]]
    return [(name, begin, end) for (name, begin), (_, end) in pairwise(marks) if name]


def within(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """What of them lies between two moments."""
    cut = ((name, max(first, begin), min(last, end)) for name, first, last in spans)
    return [span for span in cut if span[1] < span[2]]


def usual_parts(ranks: Sequence[Noted]) -> dict[str, float]:
    """Seconds of a usual step in each part: the mean over ranks and over the middle half of the steps by length."""
    kept = [noted.parts(*step) for noted in ranks for step in middle_half(noted.steps)]
    return {name: fmean(parts[name] for parts in kept) if kept else 0.0 for name in PARTS}


def usual_seconds(ranks: Sequence[Noted]) -> float:
    """The whole of such a step, from when it begins to when the next one does."""
    kept = [end - begin for noted in ranks for begin, end in middle_half(noted.steps)]
    return fmean(kept) if kept else 0.0


def middle_half(steps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the shortest and the longest quarter, which tell of what else the machine did."""
    ordered = sorted(steps, key=lambda step: step[1] - step[0])
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def timeline(ranks: Sequence[Noted], index: int, number: int) -> Timeline:
    """One step of all ranks, the `index`-th that they noted, which was step `number` of the training."""
    times = [noted.steps[index] for noted in ranks]
    since = min(begin for begin, _ in times)
    lanes = [
        lane
        for rank, (noted, (begin, end)) in enumerate(zip(ranks, times, strict=True))
        for lane in noted.lanes(rank, begin, end, since)
    ]
    return Timeline(step=number, lanes=lanes)


def _seconds_by_name(spans: Iterable[Span]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, begin, end in spans:
        found[name] = found.get(name, 0.0) + end - begin
    return found


def _spans(values: Iterable[Sequence[Any]]) -> list[Span]:
    return [(str(name), float(begin), float(end)) for name, begin, end in values]
