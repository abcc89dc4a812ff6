"""Downsampled curves of a run, made while its steps are read: bounded size, with extremes kept."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from evenstep.record import Record, Step

NUM_BINS = 300
MOST_SAMPLED = 10_000
Point = tuple[float, float]


class Thinned:
    """Points of a series to draw: of each interval the lowest, the highest and the first non-finite; and both ends."""

    def __init__(self, num_bins: int = NUM_BINS) -> None:
        self._num_bins = num_bins
        self._points: list[Point] = []

    @classmethod
    def of(cls, points: Iterable[Point], num_bins: int = NUM_BINS) -> Thinned:
        thinned = cls(num_bins)
        for x, y in points:
            thinned.add(x, y)
        return thinned

    def add(self, x: float, y: float) -> None:
        """Add a point to the right of the others."""
        self._points.append((x, y))
        # However long the series is, no more than this is kept of it.
        if len(self._points) > 12 * self._num_bins:
            self._points = _thinned(self._points, self._num_bins)

    def points(self) -> list[Point]:
        """From left to right; infinity cannot be drawn and becomes a gap, as NaN is one."""
        return [(x, y if math.isfinite(y) else math.nan) for x, y in _thinned(self._points, self._num_bins)]


def _thinned(points: list[Point], num_bins: int) -> list[Point]:
    if len(points) <= 2 * num_bins:
        return points
    begin, end = points[0][0], points[-1][0]
    width = (end - begin) / num_bins or 1.0
    kept = dict([points[0], points[-1]])
    for _, of_bin in groupby(points, lambda point: int((point[0] - begin) / width)):
        inside = list(of_bin)
        finite = [point for point in inside if math.isfinite(point[1])]
        gaps = [point for point in inside if not math.isfinite(point[1])]
        ends = [min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))] if finite else []
        kept |= dict([*ends, *gaps[:1]])
    return sorted(kept.items())


class Sampled:
    """A uniform random sample of a series, of at most MOST_SAMPLED values."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.values: list[float] = []
        self.count = 0
        """Of all finite values."""
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
        """Add a value, unless it is not finite."""
        if not math.isfinite(value):
            return
        self.count += 1
        self.least, self.most = min(self.least, value), max(self.most, value)
        if self.count <= MOST_SAMPLED:
            self.values.append(value)
        elif (index := int(self._random.random() * self.count)) < MOST_SAMPLED:
            self.values[index] = value


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """The distribution of values, in eight numbers."""

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
        if not sampled.count:
            return None
        cuts = [float(cut) for cut in np.quantile(sampled.values, [0.05, 0.25, 0.5, 0.75, 0.95])]
        names = ("p5", "p25", "middle", "p75", "p95")
        return cls(count=sampled.count, least=sampled.least, most=sampled.most, **dict(zip(names, cuts, strict=True)))


def evenly(values: Sequence[float], most: int) -> list[float]:
    """At most this number of values, at equal distances."""
    if len(values) <= most:
        return list(values)
    return [values[int(index)] for index in np.linspace(0, len(values) - 1, most)]


class Curves:
    """The steps of a Record, as curves and counts."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self.loss = Thinned()
        self.samples_per_second = Thinned()
        self.input_ms = Thinned()
        self.lr = Thinned()
        self.lr_changes = False
        self.grad_norm = Thinned()
        self.logged: dict[str, Thinned] = {}
        """What the loss gave to `evenstep.log`, by name."""
        self.seconds = Sampled()
        """Of all steps but the first, which starts things up."""
        self.samples = 0
        self.total_seconds = 0.0
        self.num_not_finite = 0
        self.peak_bytes: dict[str, int] = {}
        self.last: Step | None = None
        for step in steps:
            self.add(step)

    def logged_as(self, name: str) -> Thinned:
        """What the loss logged under this name; empty if it did not."""
        return self.logged.get(name) or Thinned()

    def add(self, step: Step) -> None:
        self.loss.add(step.step, step.loss)
        self.samples_per_second.add(step.step, step.samples / step.seconds if step.seconds > 0 else math.nan)
        self.input_ms.add(step.step, step.input_seconds * 1000)
        self.lr.add(step.step, step.lr)
        if step.grad_norm is not None:
            self.grad_norm.add(step.step, step.grad_norm)
        for name, value in step.logged.items():
            self.logged.setdefault(name, Thinned()).add(step.step, value)
        self.lr_changes |= self.last is not None and step.lr != self.last.lr
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
