"""What a check found, as a value that a table and JSON are made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from evenstep.errors import EvenstepError

Status = Literal["good", "warn", "bad"]
Number = int | float | str | bool | None
STATUSES: tuple[Status, ...] = ("good", "warn", "bad")
MAX_TEXT_CHARS = 600
"""Letters of a text that comes from elsewhere: an error of NCCL's, or another machine."""
MOST_NAME = 100
"""Letters of a name that comes from another machine."""
MAX_NUMBERS = 200


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: how it is, and what helps if it is not good."""

    name: str
    status: Status
    said: str
    advice: str = ""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """What was measured or looked up, in base units: bytes, seconds, bytes per second."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "numbers": dict(self.numbers)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        """What another machine sent; whatever it is, texts are short texts and numbers are numbers."""
        status: Status = values["status"] if values["status"] in STATUSES else "bad"
        name, said, advice = (str(values[name])[:MAX_TEXT_CHARS] for name in ("name", "said", "advice"))
        numbers = list(values["numbers"].items())[:MAX_NUMBERS]
        plain = {str(key)[:MOST_NAME]: _short(value) for key, value in numbers if isinstance(value, Number)}
        return cls(name[:MOST_NAME], status, said, advice, plain)

    def of(self, machine: str) -> Finding:
        """The same, said of a machine by its name."""
        return replace(self, name=f"{machine}: {self.name}")


@dataclass(frozen=True)
class Check:
    """Something to look at, and the words for it while it is looked at."""

    name: str
    look: Callable[[], Sequence[Finding]]
    is_trial: bool = False
    """Whether processes are started for it: it takes seconds."""

    def findings(self) -> list[Finding]:
        """What it found; a check that fails is a finding too, since a strange machine is what a doctor is for."""
        try:
            return list(self.look())
        except EvenstepError:
            raise
        except Exception as error:
            why = f"could not be {'tried' if self.is_trial else 'looked at'}: {type(error).__name__}: {error}"
            # Where no process of a trial can be started, none of a training can.
            advice = "are processes, open files and memory left? ulimit -a says what is allowed" * self.is_trial
            return [Finding(self.name, "bad" if self.is_trial else "warn", why[:MAX_TEXT_CHARS], advice)]


def finite(value: Any) -> float:
    """A number that another machine sent; ValueError if it is none that can be compared."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no number")
    return number


def _short(value: Number) -> Number:
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARS]
    # JSON knows no others.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def worst(findings: Sequence[Finding]) -> Status:
    """The status of all of them together."""
    return max((one.status for one in findings), key=STATUSES.index, default="good")


def count(findings: Sequence[Finding], status: Status) -> int:
    """How many are of this status."""
    return sum(one.status == status for one in findings)
