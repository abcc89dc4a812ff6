"""What a step is made of, computed from the timeline that `--profile` wrote.

numbers("runs/NAME/trace.json.gz")

Every moment of a step belongs to one part. On a card it belongs to what the card computes; where nothing is computed
while something travels, to communication that is not hidden; and to what the host is doing where the card does
nothing. On a CPU the host is what computes.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenstep.errors import BadInput
from evenstep.record import PARTS
from evenstep.report.lanes import (
    COMMUNICATION,
    COMPUTE,
    INPUT,
    MARK,
    SENDING,
    STEP,
    Event,
    is_mark,
    is_nccl,
    read_events,
)
from evenstep.report.spans import Span, common, length, span_of, union, without

FILE, NUMBERS = "trace.json.gz", "numbers.json"
HOST_PARTS = tuple(part for part in PARTS if part != COMMUNICATION)
SMALL_GAP = 50.0
"""Microseconds from one operation to the next in which a CPU still counts as computing: the engine's own way."""
_NO_COMPUTING = ("c10d::", "autograd::", "torch::autograd::", "_c10d_functional::")
_ASKING = ("cuda_runtime", "cuda_driver")
_NEAR = 8
_MAIN = (INPUT, COMPUTE)
_MEMORY = ("gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, kw_only=True)
class RankNumbers:
    """The mean step of one rank."""

    rank: int
    steps: int
    step_seconds: float
    parts: dict[str, float]
    """Seconds of a step in each of PARTS; communication is what of it was not hidden behind computing."""
    communication_seconds: float
    """Seconds of a step in which something travelled, hidden or not."""

    @property
    def told(self) -> float:
        """Which part of the step its parts account for."""
        return sum(self.parts.values()) / self.step_seconds


def numbers(path: str | Path) -> list[RankNumbers]:
    """The mean step of every rank in a trace file, in the order of ranks."""
    of_rank: dict[int, list[Event]] = {}
    for event in read_events(Path(path))["traceEvents"]:
        of_rank.setdefault(event["pid"], []).append(event)
    found = [_rank_numbers(rank, events) for rank, events in sorted(of_rank.items())]
    if not any(one.steps for one in found):
        raise BadInput(f"{path} holds no step that evenstep marked; --profile writes such a trace")
    return [one for one in found if one.steps]


def write_numbers(found: Sequence[RankNumbers], path: Path) -> None:
    """For programs: the same numbers as JSON."""
    path.write_text(json.dumps({"unit": "seconds", "ranks": [asdict(one) for one in found]}, indent=1) + "\n")


def lines(found: Sequence[RankNumbers]) -> list[str]:
    """For people: a row for each rank, milliseconds and shares of the step."""
    titles = ["rank", "step ms", *("not hidden" if part == COMMUNICATION else part for part in PARTS)]
    rows = [titles]
    for one in found:
        shares = [f"{one.parts[part] * 1e3:.2f} {one.parts[part] / one.step_seconds:4.0%}" for part in PARTS]
        rows.append([str(one.rank), f"{one.step_seconds * 1e3:.2f}", *shares])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _rank_numbers(rank: int, events: list[Event]) -> RankNumbers:
    lanes = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    doings = _Doings([event for event in events if event["ph"] == "X"], lanes)
    steps = [span_of(event) for event in doings.marks if event["name"].startswith(STEP)]
    every = free = union(steps)
    in_seconds = 1e6 * max(1, len(steps))
    parts = dict.fromkeys(PARTS, 0.0)
    for part, claimed in doings.claims():
        parts[part] += length(common(free, claimed)) / in_seconds
        free = without(free, claimed)
    return RankNumbers(
        rank=rank,
        steps=len(steps),
        step_seconds=length(every) / in_seconds,
        parts=parts,
        communication_seconds=length(common(every, doings.travelling())) / in_seconds,
    )


class _Doings:
    """What one rank did, and for which part of a step."""

    def __init__(self, spans: list[Event], lanes: Mapping[int, str]) -> None:
        self._spans = spans
        self._lanes = lanes
        self.marks = [event for event in spans if is_mark(event)]
        self._kernels = self._on_card(("kernel",))
        self._memory = self._on_card(_MEMORY)

    def claims(self) -> Iterator[tuple[str, list[Span]]]:
        """What claims a moment for which part; the first that does has it."""
        yield COMMUNICATION, without(self.travelling(), self._computing())
        for on_card in (self._kernels, self._memory):
            for part in HOST_PARTS:
                yield part, union(on_card[part])
        # Where seats have threads of their own, the main thread waits for them, and has the last say.
        for of_main in (False, True):
            marks = [event for event in self.marks if (self._lane(event) in _MAIN) is of_main]
            for part in HOST_PARTS:
                yield part, union(span_of(event) for event in marks if event["name"] == f"{MARK}{part}")

    def travelling(self) -> list[Span]:
        """When something is on its way."""
        on_host = [span_of(event) for event in self._spans if self._lane(event).startswith(COMMUNICATION)]
        return union([*on_host, *self._kernels[COMMUNICATION], *self._memory[COMMUNICATION]])

    def _computing(self) -> list[Span]:
        """When this rank computes: its card, if it has one."""
        if any(self._kernels.values()):
            return union(span for part in HOST_PARTS for span in self._kernels[part])
        return union((span_of(event) for event in self._spans if self._is_computing(event)), SMALL_GAP)

    def _is_computing(self, event: Event) -> bool:
        # What has no namespace is a node of autograd: a function of the user's or of FSDP's, which may wait in it.
        is_operation = event.get("cat") == "cpu_op" and "::" in event["name"]
        return is_operation and not event["name"].startswith(_NO_COMPUTING) and self._lane(event).startswith(COMPUTE)

    def _lane(self, event: Event) -> str:
        return self._lanes.get(event["tid"], "")

    def _on_card(self, kinds: Sequence[str]) -> dict[str, list[Span]]:
        """What a card did, by what the host was doing when it asked for that."""
        found: dict[str, list[Span]] = {part: [] for part in PARTS}
        asked = {_correlation(event): event for event in self._spans if event.get("cat") in _ASKING}
        phases = _Phases(self.marks)
        for event in self._spans:
            if event.get("cat") in kinds:
                asking = asked.get(_correlation(event), event)
                part = COMMUNICATION if is_nccl(event["name"]) else phases.at(asking["tid"], asking["ts"])
                if part is not None:
                    found[part].append(span_of(event))
        return found


class _Phases:
    """What the host was doing at a moment: the thread that asks, or, if it is one of autograd's, any other."""

    def __init__(self, marks: list[Event]) -> None:
        self._of_lane: dict[Any, list[tuple[float, float, str]]] = {}
        parts = {f"{MARK}{part}": part for part in HOST_PARTS} | dict.fromkeys(SENDING, COMMUNICATION)
        for event in sorted(marks, key=lambda event: float(event["ts"])):
            if event["name"] in parts:
                for lane in (event["tid"], None):
                    self._of_lane.setdefault(lane, []).append((*span_of(event), parts[event["name"]]))

    def at(self, lane: int, moment: float) -> str | None:
        """The part; None if nothing is marked there."""
        for phases in (self._of_lane.get(lane, []), self._of_lane.get(None, [])):
            place = bisect_right(phases, (moment, float("inf")))
            # The last one that had begun: what was begun inside of another is more to the point.
            for _, end, part in reversed(phases[max(0, place - _NEAR) : place]):
                if moment < end:
                    return part
        return None


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")
