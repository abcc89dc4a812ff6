"""Downsampled curves of a run, made while its steps are read: bounded size, with extremes kept."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.record import Record, Step

NUM_BINS = 300
MOST_SAMPLED = 10_000
Point = tuple[float, float]


class Thinned:
    """Which points of a series to draw: of each bin the least, the most and the first that is no number; and both ends.

    A series of any length has at most twice `num_bins` bins. When they are full, each two become one.
    """

    def __init__(self, num_bins: int = NUM_BINS) -> None:
        self._most_bins = 2 * num_bins
        self._bins: list[_Bin] = []
        self._width = 1
        self._first: Point | None = None
        self._last: Point | None = None

    @classmethod
    def of(cls, points: Iterable[Point], num_bins: int = NUM_BINS) -> Thinned:
        """Of a series that is there already."""
        thinned = cls(num_bins)
        for x, y in points:
            thinned.add(x, y)
        return thinned

    def add(self, x: float, y: float) -> None:
        """One more, on the right of the others."""
        self._last = (x, y)
        if self._first is None:
            self._first = self._last
        if not self._bins or self._bins[-1].num == self._width:
            if len(self._bins) == self._most_bins:
                self._bins = [
                    one.with_next(other) for one, other in zip(self._bins[::2], self._bins[1::2], strict=True)
                ]
                self._width *= 2
            self._bins.append(_Bin())
        self._bins[-1].add(self._last)

    def points(self) -> list[Point]:
        """From left to right; infinity cannot be drawn and becomes a gap, as NaN is one."""
        ends = [one for one in (self._first, self._last) if one is not None]
        kept = {x: y for one in self._bins for x, y in one.points()} | dict(ends)
        return [(x, y if math.isfinite(y) else math.nan) for x, y in sorted(kept.items())]


class _Bin:
    __slots__ = ("gap", "least", "most", "num")

    def __init__(self) -> None:
        self.num = 0
        self.least: Point | None = None
        self.most: Point | None = None
        self.gap: Point | None = None
        """The first that is no number."""

    def add(self, point: Point) -> None:
        self.num += 1
        y = point[1]
        if not math.isfinite(y):
            self.gap = self.gap or point
            return
        if self.least is None or y < self.least[1]:
            self.least = point
        if self.most is None or y > self.most[1]:
            self.most = point

    def with_next(self, other: _Bin) -> _Bin:
        num = self.num + other.num
        for point in other.points():
            self.add(point)
        self.num = num
        return self

    def points(self) -> list[Point]:
        return [point for point in (self.least, self.most, self.gap) if point is not None]


class Sampled:
    """Values from all over a series, each of them as likely to be there as any other; all, while they are few."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.values: list[float] = []
        self.count = 0
        """How many finite ones there were."""
        self.least, self.most = math.inf, -math.inf
        self._random = random.Random(0)
        for value in values:
            self.add(value)

    @classmethod
    def merged(cls, parts: Sequence[Sampled]) -> Sampled:
        """Of several series: each gives as many values as its share of them all."""
        whole = cls()
        whole.count = sum(part.count for part in parts)
        share = min(1.0, MOST_SAMPLED / max(whole.count, 1))
        for part in parts:
            whole.least, whole.most = min(whole.least, part.least), max(whole.most, part.most)
            whole.values += whole._random.sample(part.values, min(len(part.values), round(share * part.count)))
        return whole

    def add(self, value: float) -> None:
        """One more; what is no number is left out."""
        if not math.isfinite(value):
            return
        self.count += 1
        self.least, self.most = min(self.least, value), max(self.most, value)
        if self.count <= MOST_SAMPLED:
            self.values.append(value)
        elif (place := int(self._random.random() * self.count)) < MOST_SAMPLED:
            self.values[place] = value


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """How values are spread, in eight numbers."""

    count: int
    least: float
    p5: float
    p25: float
    middle: float
    p75: float
    p95: float
    most: float

    @classmethod
    def of(cls, sampled: Sampled) -> Quantiles | None:
        """None where there are no values."""
        if not sampled.count:
            return None
        cuts = [float(cut) for cut in np.quantile(sampled.values, [0.05, 0.25, 0.5, 0.75, 0.95])]
        names = ("p5", "p25", "middle", "p75", "p95")
        return cls(count=sampled.count, least=sampled.least, most=sampled.most, **dict(zip(names, cuts, strict=True)))


def evenly(values: Sequence[float], most: int) -> list[float]:
    """So many of them at most, from all over."""
    if len(values) <= most:
        return list(values)
    return [values[int(place)] for place in np.linspace(0, len(values) - 1, most)]


class Curves:
    """The steps of a Record, as curves and counts."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self.loss = Thinned()
        self.samples_per_second = Thinned()
        self.input_ms = Thinned()
        self.seconds = Sampled()
        """Of all steps but the first, which starts things up."""
        self.samples = 0
        """Of these steps."""
        self.total_seconds = 0.0
        self.num_not_finite = 0
        """Losses."""
        self.peak_bytes: dict[str, int] = {}
        self.last: Step | None = None
        for step in steps:
            self.add(step)

    def add(self, step: Step) -> None:
        """One more."""
        self.loss.add(step.step, step.loss)
        self.samples_per_second.add(step.step, step.samples / step.seconds if step.seconds > 0 else math.nan)
        self.input_ms.add(step.step, step.input_seconds * 1000)
        self.num_not_finite += not math.isfinite(step.loss)
        self.peak_bytes |= step.peak_bytes
        if self.last is not None:
            self.seconds.add(step.seconds)
            self.samples += step.samples
            self.total_seconds += step.seconds
        self.last = step


@dataclass(frozen=True)
class ReadRun:
    """A Record, and the curves of its steps."""

    record: Record
    curves: Curves

    @classmethod
    def of(cls, record: Record) -> ReadRun:
        """Every step is read once."""
        return cls(record, Curves(record.steps))

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The peak of every device, as far as the Record knows."""
        ends = (self.record.summary, self.record.measurement)
        return next((end.peak_bytes for end in ends if end is not None), self.curves.peak_bytes)

    @property
    def step_seconds(self) -> Sampled:
        """Of every measured step; of a run that was not measured, of all but the first."""
        measured = self.record.measurement
        return Sampled(measured.step_seconds) if measured is not None else self.curves.seconds
