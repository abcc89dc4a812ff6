"""The result of `compare` as a value: one row per configuration, from which tables and pages are made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from msgspec import Meta

from evenstep.errors import Preempted
from evenstep.typed_values import Natural, Positive, Schema

FILE = "comparison.json"
LINKS_FILE = "links.json"
"""Of `compare --links`."""
STOPPED = "stopped"
"""The file that a comparison leaves instead if it was stopped."""
Parity = Literal["reference", "same", "differs", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Median, minimum and maximum over several blocks."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(middle=median(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy on some devices."""

    strategy: str
    devices: Annotated[list[str], Meta(min_length=1)]
    samples_per_second: Range
    step_seconds: Range
    parts: dict[str, float]
    """Seconds of a step in input, forward, backward, communication that is not hidden, and optimizer."""
    without_input_seconds: Range
    """A step with its batch already loaded: the limit of what faster input could gain."""
    without_communication_seconds: Range | None
    """A step without communication: the limit of what faster links could gain. None where nothing is sent."""
    sent_bytes: Natural
    """By each rank in a step."""
    peak_bytes: dict[str, Natural]
    start_seconds: Range
    """From the start of the processes to the end of the first step."""
    parity: Parity
    """Whether it matches training on one device."""
    why: str = ""
    """One sentence about that."""
    threads: Natural = 0
    """Of each process."""
    runs: list[str] = field(default_factory=list)
    """The folders of its blocks, below that of the comparison."""
    virtual_replicas: Positive | None = None
    """Virtual replicas, if it was measured with such."""
    shares: str | None = None
    """Of the devices in a global batch, if they were not equal."""
    accumulate: Positive = 1
    """Micro-batches of a step."""
    mesh: str | None = None
    """How ranks were arranged, if that was chosen."""
    schedule: str | None = None
    """Of a pipeline, if it was chosen."""

    @property
    def label(self) -> str:
        name = f"{self.strategy} x {len(self.devices)}" if len(self.devices) > 1 else self.strategy
        return name + self._cut

    @property
    def series(self) -> str:
        """What is one line in a chart over the number of devices."""
        return self.strategy + self._cut

    @property
    def _cut(self) -> str:
        shares = "" if self.shares is None else f", shares {self.shares}"
        arranged = "".join(f", {one}" for one in (self.mesh, self.schedule) if one is not None)
        virtual = "" if self.virtual_replicas is None else f", V={self.virtual_replicas}"
        return f"{shares}{arranged}{virtual}"

    @property
    def is_sound(self) -> bool:
        """Whether it is not known to differ from the reference."""
        return self.parity in ("reference", "same", "unknown")


@contextmanager
def marking_stop(folder: Path) -> Iterator[None]:
    """Around measurements in a folder: if Ctrl-C or a signal ends them, STOPPED is left there."""
    try:
        yield
    except (KeyboardInterrupt, Preempted):
        with suppress(OSError):
            (folder / STOPPED).touch()
        raise


@dataclass(frozen=True, kw_only=True)
class LargerBatch:
    """The fastest configuration with a batch `times` as large: are the steps too small?"""

    times: Positive
    label: str
    samples_per_second: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All of it. Speed-up is samples per second over those of the first row; efficiency is that per device."""

    task: str
    batch: Positive
    precision: str
    steps: Natural
    """Of each block, after the warm-up."""
    rounds: Natural
    rows: list[Row]
    """The first row is the baseline."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Labels of what could not be measured, and why."""
    machine: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    created: str = ""
    larger_batch: LargerBatch | None = None
    advice: list[str] = field(default_factory=list)
    """Which one to take, with the reason and the number; and its bottleneck."""

    def speedup(self, row: Row) -> float:
        """How many times as many samples a second as the first row."""
        first = self.rows[0].samples_per_second.middle
        return row.samples_per_second.middle / first if first else 0.0

    def efficiency(self, row: Row) -> float:
        """Speed-up per device, relative to the first row."""
        return self.speedup(row) * len(self.rows[0].devices) / len(row.devices)

    def write(self, folder: Path) -> Path:
        path = folder / FILE
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def read(cls, folder: str | Path) -> Comparison:
        return _SCHEMA.read(Path(folder) / FILE if os.path.isdir(folder) else Path(folder))


_SCHEMA: Schema[Comparison] = Schema(Comparison, "comparison", advice="give the folder of one")
