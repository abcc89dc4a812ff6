"""What is asked, and what the answer looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PARTS = ("loss", "gradients", "weights", "optimizer", "evaluation", "samples", "checkpoint")


@dataclass(frozen=True)
class Way:
    """One way to train: a strategy, its devices, and into how many micro-batches each device cuts its share."""

    strategy: str
    devices: tuple[str, ...]
    accumulate: int = 1

    @property
    def label(self) -> str:
        """`ddp x 2`, `single`, `single, 2 micro-batches`."""
        name = f"{self.strategy} x {len(self.devices)}" if len(self.devices) > 1 else self.strategy
        return f"{name}, {self.accumulate} micro-batches" if self.accumulate > 1 else name


@dataclass(frozen=True)
class Part:
    """One thing that was compared: the largest difference, relative to its size; None where there is nothing."""

    difference: float | None
    is_same: bool


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a way differs, and the tests that say so."""

    name: str
    """A short name for programs: `batchnorm`, `rank`, `mean-of-means` ..."""
    sentence: str
    evidence: tuple[str, ...] = ()
    """What was tried, and what came of it."""
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a way learns what `single` learns; if not, where it first differs, by how much, and why."""

    is_same: bool
    sentence: str
    cause: str = ""
    """`name` of the cause, where one was found."""
    why: str = ""
    evidence: tuple[str, ...] = ()
    advice: str = ""
    first_step: int | None = None
    first_tensor: str | None = None
    difference: float | None = None
    notes: tuple[str, ...] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For programs; a difference that is not finite is null."""
        values = asdict(self)
        values["parts"] = {name: asdict(part) for name, part in self.parts.items()}
        for place in (values, *values["parts"].values()):
            place["difference"] = _finite(place["difference"])
        return values


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None
