"""What other machines send, each value of the kind that it should be; anything else is an error of `read`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.doctor.finding import MOST_SAID, Finding, finite
from evenstep.doctor.trying import Ended

MOST_FINDINGS = 1000


@dataclass(frozen=True)
class Heard:
    """What a machine found with itself, and between itself and others."""

    own: tuple[Finding, ...]
    pairs: tuple[Finding, ...]


def read_report(values: Mapping[str, Any]) -> Heard:
    """What another machine found."""
    own, pairs = ([Finding.from_json(one) for one in values[name][:MOST_FINDINGS]] for name in ("own", "pairs"))
    return Heard(tuple(own), tuple(pairs))


def read_verdict(values: Mapping[str, Any]) -> Finding:
    """What the first machine says of all."""
    usual = {"name": "all machines", "advice": "", "numbers": {}}
    return Finding.from_json({**usual, "status": values["status"], "said": values["said"]})


def read_ended(values: Mapping[str, Any]) -> Ended:
    """How another machine's part of an attempt ended: one process, whose rows can be judged."""
    why, is_late = str(values["why"])[:MOST_SAID], bool(values["is_late"])
    if why:
        return Ended(why=why, is_late=is_late)
    (returned,) = values["returned"]
    rows = [_row(row) for row in returned["rows"]]
    if not rows:
        raise ValueError("nothing was added up")
    return Ended(({"rows": rows, "copy_bytes_per_second": finite(returned["copy_bytes_per_second"])},))


def _row(values: Mapping[str, Any]) -> dict[str, Any]:
    seconds = {name: finite(values[name]) for name in ("median_seconds", "best_seconds")}
    if min(seconds.values()) <= 0:
        raise ValueError(f"{min(seconds.values())} s is no time")
    return {"num_bytes": int(values["num_bytes"]), "is_right": values["is_right"] is True, **seconds}
