"""What a check found, as a value that a table and JSON are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from evenstep.errors import EvenstepError

Status = Literal["good", "warn", "bad"]
Number = int | float | str | bool | None
STATUSES: tuple[Status, ...] = ("good", "warn", "bad")
MOST_SAID = 600
"""Letters of a text that comes from elsewhere: an error of NCCL's, or another machine."""


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
        texts = [str(values[name])[:MOST_SAID] for name in ("name", "said", "advice")]
        numbers = {str(name): value for name, value in values["numbers"].items() if isinstance(value, Number)}
        return cls(texts[0], status, texts[1], texts[2], numbers)

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
            why = f"could not be looked at: {type(error).__name__}: {error}"
            return [Finding(self.name, "warn", why[:MOST_SAID])]


def worst(findings: Sequence[Finding]) -> Status:
    """The status of all of them together."""
    return max((one.status for one in findings), key=STATUSES.index, default="good")


def count(findings: Sequence[Finding], status: Status) -> int:
    """How many are of this status."""
    return sum(one.status == status for one in findings)
