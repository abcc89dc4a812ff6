"""What a page shows of the steps of a run, gathered while they are read: of a long run as little as of a short one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from evenstep.record import Record, Step
from evenstep.report.thin import Sampled, Thinned


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
