"""Checks of a machine, and of several together: each check gives findings, for the table and for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evenstep.errors import EvenstepError

Status = Literal["good", "warn", "bad"]
Number = int | float | str | bool | None
STATUSES: tuple[Status, ...] = ("good", "warn", "bad")
MAX_TEXT_CHARS = 600
"""Characters of an error message."""


@dataclass(frozen=True)
class Finding:
    """The status of one thing that was checked, and advice if it is not good."""

    name: str
    status: Status
    said: str
    advice: str = ""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """Measured values, in base units: bytes, seconds, bytes per second."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "numbers": dict(self.numbers)}


@dataclass(frozen=True)
class Check:
    """A check and its name."""

    name: str
    look: Callable[[], Sequence[Finding]]
    is_trial: bool = False
    """Whether it starts processes, which takes seconds."""

    def findings(self) -> list[Finding]:
        """Run the check; an exception is a finding too, since diagnosing broken machines is the purpose."""
        try:
            return list(self.look())
        except EvenstepError:
            raise
        except Exception as error:
            why = f"could not be {'tried' if self.is_trial else 'checked'}: {type(error).__name__}: {error}"
            # Where no process of a trial can be started, none of a training can.
            advice = "are processes, open files and memory left? ulimit -a shows the limits" * self.is_trial
            return [Finding(self.name, "bad" if self.is_trial else "warn", why[:MAX_TEXT_CHARS], advice)]


def worst(findings: Sequence[Finding]) -> Status:
    return max((one.status for one in findings), key=STATUSES.index, default="good")


def count(findings: Sequence[Finding], status: Status) -> int:
    return sum(one.status == status for one in findings)
