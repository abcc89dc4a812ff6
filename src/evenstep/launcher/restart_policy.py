"""Whether a failed run is started again, and after which pause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep.launcher.failure import Cause, report

MAX_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class Restart:
    """The next attempt of a run."""

    number: int
    allowed: int
    pause: float
    """In seconds."""
    is_loss: bool
    """Whether a machine was lost, which counts as no failure: the others go on."""

    def describe(self, where: str) -> str:
        wait = f", in {self.pause:.0f} s" if self.pause else ""
        return f"continuing{where}" if self.is_loss else f"restart {self.number} of {self.allowed},{where}{wait}"


def next_restart(causes: Sequence[Cause], allowed: int, folder: Path) -> Restart:
    """What follows the last of these causes; raises the report of all if another attempt would not help."""
    last = causes[-1]
    counted = [one for one in causes if not one.is_loss]
    if last.is_final or (not allowed and not last.is_loss):
        raise report(causes, folder)
    same = [one for one in counted if one.step == last.step and not one.is_outside]
    if last.step and not last.is_outside and len(same) > 1:
        raise report(counted, folder, f"step {last.step} has failed twice: it would fail again")
    if len(counted) > allowed:
        most = f"restarted {allowed} time{'s' * (allowed > 1)}, the maximum set by --restarts {allowed}"
        raise report(counted, folder, most)
    return Restart(len(counted), allowed, 0.0 if last.is_loss else _pause_seconds(counted), last.is_loss)


def _pause_seconds(causes: Sequence[Cause]) -> float:
    """No pause after the first failure, then 1, 2, 4 ... seconds until a later step is reached."""
    steps = [one.step for one in causes]
    without = 0
    while without + 1 < len(steps) and steps[-1 - without] <= steps[-2 - without]:
        without += 1
    return min(MAX_PAUSE_SECONDS, 2.0 ** (without - 1)) if without else 0.0
