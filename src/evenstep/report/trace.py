"""What a step is made of, computed from the timeline that `--profile` wrote.

numbers("runs/NAME/trace.json.gz")

Every moment of a step belongs to one part. On a card it belongs to what the card computes; where nothing is computed
while something travels, to communication that is not hidden; and to what the host is doing where the card does
nothing. On a CPU the host is what computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenstep.errors import BadInput
from evenstep.record import PARTS
from evenstep.report.lanes import COMMUNICATION, COMPUTE, MARK, SENDING, STEP, Event, is_nccl, read_events
from evenstep.report.spans import Span, common, length, union, without

FILE, NUMBERS = "trace.json.gz", "numbers.json"
HOST_PARTS = tuple(part for part in PARTS if part != COMMUNICATION)
SMALL_GAP = 50.0
"""Microseconds from one operation to the next in which a CPU still counts as computing: the engine's own way."""
_NO_COMPUTING = ("c10d::", "autograd::", "torch::autograd::", "_c10d_functional::")
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
    spans = [event for event in events if event["ph"] == "X"]
    steps = [_span(event) for event in spans if event["name"].startswith(STEP)]
    every = union(steps)
    travelling, computing = _travelling(spans, lanes), _computing(spans, lanes)
    parts = dict.fromkeys(PARTS, 0.0)
    free = every
    for part, claimed in _claims(spans, travelling, computing):
        parts[part] += length(common(free, claimed)) / max(1, len(steps)) / 1e6
        free = without(free, claimed)
    whole = length(every) / max(1, len(steps)) / 1e6
    travelled = length(common(every, travelling)) / max(1, len(steps)) / 1e6
    return RankNumbers(rank=rank, steps=len(steps), step_seconds=whole, parts=parts, communication_seconds=travelled)


def _claims(spans: list[Event], travelling: list[Span], computing: list[Span]) -> Iterator[tuple[str, list[Span]]]:
    """What claims a moment for which part; the first that does has it."""
    yield COMMUNICATION, without(travelling, computing)
    for kinds in (("kernel",), _MEMORY):
        launched = _by_phase(spans, kinds)
        for part in HOST_PARTS:
            yield part, union(launched[part])
    for part in HOST_PARTS:
        yield part, union(_span(event) for event in spans if event["name"] == f"{MARK}{part}")


def _travelling(spans: list[Event], lanes: Mapping[int, str]) -> list[Span]:
    kernels = [_span(event) for event in spans if event.get("cat") == "kernel" and is_nccl(event["name"])]
    on_host = [_span(event) for event in spans if lanes.get(event["tid"], "").startswith(COMMUNICATION)]
    return union([*kernels, *on_host])


def _computing(spans: list[Event], lanes: Mapping[int, str]) -> list[Span]:
    """When this rank computes: its card, if it has one."""
    launched = _by_phase(spans, ("kernel",))
    if any(launched.values()):
        return union(span for part in launched.values() for span in part)
    # What has no namespace is a node of autograd: a function of the user's or of FSDP's, which may wait in it.
    return union(
        (
            _span(event)
            for event in spans
            if event.get("cat") == "cpu_op"
            and "::" in event["name"]
            and not event["name"].startswith(_NO_COMPUTING)
            and lanes.get(event["tid"], "").startswith(COMPUTE)
        ),
        SMALL_GAP,
    )


def _by_phase(spans: list[Event], kinds: Sequence[str]) -> dict[str, list[Span]]:
    """What a card did, by what the host was doing when it asked for that; what NCCL does is not among it."""
    found: dict[str, list[Span]] = {part: [] for part in HOST_PARTS}
    on_card = [event for event in spans if event.get("cat") in kinds and not is_nccl(event["name"])]
    if not on_card:
        return found
    asked = {
        event["args"]["correlation"]: event
        for event in spans
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    phases = _Phases(spans)
    for event in on_card:
        part = phases.at(asked.get(event.get("args", {}).get("correlation"), event))
        if part is not None:
            found[part].append(_span(event))
    return found


class _Phases:
    """What the host was doing at a moment: the thread that asks, or, if it is one of autograd's, any other."""

    def __init__(self, spans: list[Event]) -> None:
        self._of_lane: dict[Any, list[tuple[float, float, str | None]]] = {}
        marks = {f"{MARK}{part}": part for part in HOST_PARTS} | dict.fromkeys(SENDING)
        for event in sorted(spans, key=lambda event: float(event["ts"])):
            if event["name"] in marks:
                begin, end = _span(event)
                for lane in (event["tid"], None):
                    self._of_lane.setdefault(lane, []).append((begin, end, marks[event["name"]]))

    def at(self, event: Event) -> str | None:
        """The part; None while our own code was sending, or nothing was marked."""
        for lane in (event["tid"], None):
            # The last one that had begun: what was begun inside of another is more to the point.
            for begin, end, part in reversed(self._of_lane.get(lane, [])):
                if begin <= event["ts"] < end:
                    return part
        return None


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]
