"""The result of `predict` as a value: measured and predicted rows, from which tables and a page are made."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from evenstep.report.comparison import Range
from evenstep.typed_values import Positive, Schema

FOLDER, FILE = "prediction", "prediction.json"
"""Below a run or a comparison."""
KNEE = 0.75
"""Of linear scaling: with less, more devices are hardly worth it."""
LIMITS = {"communication": "the link", "stragglers": "the slowest rank", "compute": "what does not shrink"}
"""What costs most, in a sentence."""
PART_NAMES = {"handling": "memory", "stragglers": "slowest", "waiting": "reading"}
"""Of parts of a step, in tables and charts, where they are not called by their own names."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One strategy on n devices; a measured one has the range of what was measured."""

    strategy: str
    devices: Positive
    machines: Positive
    batch: float
    """Of all devices."""
    samples_per_second: Range
    """Predicted: the middle, and the edges of a 90 % interval that comes from past errors."""
    step_seconds: Range
    efficiency: float
    """Samples a second for each device, over those of one device."""
    parts: dict[str, float]
    """Seconds of a step; they add up to it."""
    limit: str = ""
    """What costs most against n devices that are n times as fast."""
    is_measured: bool = False
    hidden_seconds: float = 0.0
    """Communication behind backward; not a part of a step."""
    buckets: int = 0
    """Of gradients, or units that are gathered."""
    algorithm: str = ""
    """Of their all-reduce: ring or tree, inside a machine and between machines."""
    epoch_seconds: float | None = None
    """With evaluation, checkpoints and what failures cost."""
    epoch_parts: dict[str, float] = field(default_factory=dict)
    """Seconds of an epoch: steps, evaluation, checkpoints, restarts."""
    device_hours: float | None = None
    """Of an epoch."""
    cost: float | None = None
    """Of an epoch."""
    epochs: float | None = None
    """Of the whole job, if a training was recorded."""

    @property
    def label(self) -> str:
        return f"{self.strategy} x {self.devices}" if self.devices > 1 else self.strategy


@dataclass(frozen=True, kw_only=True)
class Knee:
    """From how many devices on a strategy is below KNEE of what they could do, and what makes it so."""

    strategy: str
    devices: int | None
    """None: not up to the most that was looked at."""
    looked_at: int
    limit: str = ""
    efficiency: float = 0.0
    is_measured: bool = False
    """Whether this number of devices was."""

    @property
    def sentence(self) -> str:
        if self.devices is None:
            return f"{self.strategy}: efficiency stays at least {KNEE:.0%} up to {self.looked_at:,} devices"
        why = f"the limit is {LIMITS.get(self.limit, self.limit)}"
        if self.limit == "unexplained":
            when = "so it was measured" if self.is_measured else "fewer devices were measured to be as slow"
            why = f"{when}, and the model has no reason for it"
        return f"{self.strategy}: efficiency is below {self.efficiency:.0%} from {self.devices:,} devices on; {why}"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What some devices would give, as `doctor` and `compare` say it."""

    devices: int
    times: Range
    """Of one device."""
    limit: str
    limit_from: int | None
    """From this number of devices on they are below KNEE; None: not up to the most that was looked at."""

    @property
    def sentence(self) -> str:
        times = f"{self.times.middle:.1f} x ({self.times.low:.1f} to {self.times.high:.1f})"
        limit = LIMITS.get(self.limit, self.limit)
        when = f"is the limit from {self.limit_from:,} on" if self.limit_from else "costs most, and is no limit yet"
        return f"with {self.devices:,} of these devices expect {times}; {limit} {when}"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """All of it."""

    task: str
    rows: list[Prediction]
    curves: dict[str, list[Prediction]]
    """Of each strategy, at powers of two: for the chart."""
    knees: list[Knee]
    links: str
    errors: str
    """How wrong such forecasts were, in one sentence."""
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    command: str = ""

    @property
    def labels(self) -> list[str]:
        """Of the rows, with the batch of one that has the label of another."""
        return [self._label(row) for row in self.rows]

    def _label(self, row: Prediction) -> str:
        alike = [other for other in self.rows if other.label == row.label]
        batch = f", batch {row.batch:,.0f}" if len({other.batch for other in alike}) > 1 else ""
        is_mixed = row.is_measured and not all(other.is_measured for other in alike)
        return row.label + batch + " (measured)" * is_mixed

    def write(self, folder: Path) -> Path:
        path = folder / FILE
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def beside(cls, folder: Path) -> Forecast | None:
        """What was predicted from the Records of this folder, if anything was."""
        path = folder / FOLDER / FILE
        return cls.read(path) if path.is_file() else None

    @classmethod
    def read(cls, folder: str | Path) -> Forecast:
        return _SCHEMA.read(Path(folder) / FILE if os.path.isdir(folder) else Path(folder))


_SCHEMA: Schema[Forecast] = Schema(Forecast, "prediction", advice="give the folder of one")
