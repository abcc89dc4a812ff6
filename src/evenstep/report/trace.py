"""`train --profile`: the traces of all ranks as one timeline, and a table of the parts of a step.

`merge` writes one trace with a process per rank and lanes for input, compute, communication and CUDA streams.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from evenstep.errors import BadInput
from evenstep.record import SPAN_PREFIX, parts_shown

Span = tuple[float, float]
"""Begin and end, in whatever unit both have."""


def span_of(event: Mapping[str, Any]) -> Span:
    """When an event of a trace began and ended."""
    return event["ts"], event["ts"] + event["dur"]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as sorted spans without overlap."""
    joined: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def holds(spans: Sequence[Span], begin: float, end: float) -> bool:
    """Whether one of the spans, a result of `union`, contains the interval."""
    index = bisect_right(spans, (begin, float("inf"))) - 1
    return index >= 0 and begin < spans[index][1] and end <= spans[index][1]


Event = dict[str, Any]
FILE, NUMBERS = "trace.json.gz", "numbers.json"
STEP, TOGETHER = f"{SPAN_PREFIX}step ", f"{SPAN_PREFIX}together"
SENDING = (f"{SPAN_PREFIX}replicate", f"{SPAN_PREFIX}reduce")
STEPS, INPUT, COMPUTE, COMMUNICATION = "steps", "input", "compute", "communication"
_FIRST_LANE = {STEPS: 0, INPUT: 100, COMPUTE: 200, COMMUNICATION: 300}
_FIRST_STREAM = 400
_FLOWS = "stf"


@dataclass(frozen=True)
class RankTrace:
    """What the profiler of one rank wrote."""

    rank: int
    path: Path
    machine: str = ""
    """Ranks with the same one share a clock."""


@dataclass
class _Rank:
    """One rank's events, with times in microseconds on its machine's clock."""

    rank: int
    machine: str
    events: list[Event]
    names: dict[int, str] = field(default_factory=dict)
    """What each of its lanes is called."""

    def named(self, *prefixes: str) -> list[Event]:
        return [event for event in self.events if is_own_span(event) and event["name"].startswith(prefixes)]


def merge(traces: Sequence[RankTrace], path: Path) -> None:
    """Write the timelines of all ranks as one file, which Perfetto and chrome://tracing open as it is."""
    ranks = _read(traces)
    begins = [event["ts"] for rank in ranks for event in rank.named(STEP)]
    if not begins:
        raise BadInput(f"no step was traced: {', '.join(str(trace.path) for trace in traces)} hold none")
    late = _offsets(ranks)
    merged: list[Event] = []
    for rank in ranks:
        _into_lanes(rank)
        _shift(rank.events, -late[rank.machine] - min(begins))
        merged += [*_labels(rank), *rank.events]
    beside = path.with_name(f"{path.name}.writing")
    with gzip.open(beside, "wt", compresslevel=5) as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": merged}, file, separators=(",", ":"))
    beside.replace(path)


def read_events(path: Path) -> dict[str, Any]:
    """A trace file as it is, packed or not."""
    try:
        with gzip.open(path, "rt") if path.name.endswith(".gz") else path.open() as file:
            whole = json.load(file)
        assert isinstance(whole["traceEvents"], list)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise BadInput(f"{path} is not a trace ({type(error).__name__}: {error}); --profile writes one") from error
    return dict(whole)


def _read(traces: Sequence[RankTrace]) -> list[_Rank]:
    """All of them on the clock of the first: times as large as those since 1970 would be rounded to a quarter."""
    wholes = [read_events(trace.path) for trace in traces]
    bases = [int(whole.get("baseTimeNanoseconds", 0)) for whole in wholes]
    ranks = [_Rank(trace.rank, trace.machine, _of_use(whole)) for trace, whole in zip(traces, wholes, strict=True)]
    for rank, base in zip(ranks, bases, strict=True):
        _shift(rank.events, (base - bases[0]) / 1000)
    return ranks


def _of_use(whole: Mapping[str, Any]) -> list[Event]:
    """Spans and arrows, without those about the profiler itself."""
    kinds = ("X", *_FLOWS)
    events = [event for event in whole["traceEvents"] if event.get("ph") in kinds]
    return [event for event in events if event["pid"] != "Spans" and event.get("cat") != "overhead"]


def _shift(events: list[Event], microseconds: float) -> None:
    for event in events:
        event["ts"] = round(event["ts"] + microseconds, 3)


def _offsets(ranks: Sequence[_Rank]) -> dict[str, float]:
    """How far each machine's clock is ahead of the first one's: all ranks left one barrier at about the same time."""
    left: dict[str, list[float]] = {rank.machine: [] for rank in ranks}
    for rank in ranks:
        left[rank.machine] += [event["ts"] + event["dur"] for event in rank.named(TOGETHER)]
    first = left[ranks[0].machine]
    return {machine: median(times) - median(first) if times and first else 0.0 for machine, times in left.items()}


def _into_lanes(rank: _Rank) -> None:
    """Give every event the rank as its process and a lane as its thread."""
    steps = rank.named(STEP)
    main = (steps[0]["pid"], steps[0]["tid"]) if steps else None
    kinds = _kinds(rank, main)
    inputs = union(span_of(event) for event in rank.named(f"{SPAN_PREFIX}input") if _thread(event) == main)
    sending = union(span_of(event) for event in rank.named(*SENDING) if _thread(event) == main)
    lanes = _Lanes(rank.names)
    for kind in (INPUT, COMPUTE):
        # The first of each is the main thread's.
        lanes.number(kind, main)
    for event in rank.events:
        thread = _thread(event)
        kind = _kind_on_main(event, inputs, sending) if thread == main else kinds.get(thread, INPUT)
        event["pid"], event["tid"] = rank.rank, lanes.number(kind, thread)
        if event["ph"] in _FLOWS:
            # Arrows are matched by id, which each rank counts separately.
            event["id"] = rank.rank * 2**32 + int(event["id"])


class _Lanes:
    """Numbers and names for what threads and streams do, in the order in which they are to be shown."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._numbers: dict[tuple[str, Any], int] = {}

    def number(self, kind: str, thread: Any) -> int:
        if (kind, thread) not in self._numbers:
            first = _FIRST_LANE.get(kind, _FIRST_STREAM)
            number = next(number for number in range(first, first + 1000) if number not in self._names)
            is_more = kind in _FIRST_LANE and number > first
            self._names[number] = f"{kind} {number - first + 1}" if is_more else kind
            self._numbers[kind, thread] = number
        return self._numbers[kind, thread]


def _kind_on_main(event: Event, inputs: list[Span], sending: list[Span]) -> str:
    if str(event.get("name")).startswith(STEP):
        return STEPS
    begin, end = event["ts"], event["ts"] + event.get("dur", 0.0)
    if holds(sending, begin, end):
        return COMMUNICATION
    return INPUT if holds(inputs, begin, end) else COMPUTE


def _kinds(rank: _Rank, main: Any) -> dict[tuple[Any, Any], str]:
    """What each other thread of this process, and each CUDA stream, does.

    A thread that neither communicates nor computes prefetches.
    """
    kinds: dict[tuple[Any, Any], str] = {}
    host = main[0] if main is not None else None
    for event in rank.events:
        thread, name = _thread(event), str(event.get("name"))
        if event["ph"] != "X" or thread == main:
            continue
        if event["pid"] != host:
            kinds.setdefault(thread, f"cuda:{event['pid']} stream {event['tid']}")
            if is_nccl(name) and not kinds[thread].endswith(COMMUNICATION):
                kinds[thread] += f", {COMMUNICATION}"
        elif name.startswith("gloo:"):
            kinds[thread] = COMMUNICATION
        elif name.startswith((SPAN_PREFIX, "autograd::engine")):
            kinds.setdefault(thread, COMPUTE)
    return kinds


def _thread(event: Event) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


def is_own_span(event: Event) -> bool:
    """Whether this is evenstep's own span on the host; the profiler gives GPU spans the same names."""
    return event.get("cat") == "user_annotation" and str(event["name"]).startswith(SPAN_PREFIX)


def is_nccl(name: str) -> bool:
    """Whether a kernel is one of NCCL's."""
    return name.lower().startswith("nccl")


def _labels(rank: _Rank) -> Iterator[Event]:
    """What viewers call the rank and its lanes, and in which order they show them."""
    yield _label(rank.rank, 0, "process_name", name=f"rank {rank.rank}")
    yield _label(rank.rank, 0, "process_sort_index", sort_index=rank.rank)
    for number, name in sorted(rank.names.items()):
        yield _label(rank.rank, number, "thread_name", name=name)
        yield _label(rank.rank, number, "thread_sort_index", sort_index=number)


def _label(rank: int, lane: int, kind: str, **values: Any) -> Event:
    return {"ph": "M", "pid": rank, "tid": lane, "ts": 0, "name": kind, "args": values}


@dataclass(frozen=True, kw_only=True)
class RankNumbers:
    """The typical step of one rank, as its timer saw it."""

    rank: int
    steps: int
    parts: dict[str, float | None]
    """Seconds of a step in each of PARTS; None where torch communicates inside of forward and backward."""

    @property
    def step_seconds(self) -> float:
        """The parts together."""
        return sum(filter(None, self.parts.values()))


def write_numbers(found: Sequence[RankNumbers], path: Path) -> None:
    """Write the numbers as JSON."""
    ranks = [asdict(one) | {"step_seconds": one.step_seconds} for one in found]
    path.write_text(json.dumps({"unit": "seconds", "ranks": ranks}, indent=1) + "\n")


def lines(found: Sequence[RankNumbers]) -> list[str]:
    """A table with a row for each rank: milliseconds and shares of the step."""
    shown = parts_shown([one.parts for one in found])
    titles = ["rank", "step ms", *("not hidden" if part == COMMUNICATION else part for part in shown)]
    rows = [titles]
    for one in found:
        shares = [_share(one.parts.get(part), one.step_seconds) for part in shown]
        rows.append([str(one.rank), f"{one.step_seconds * 1e3:.2f}", *shares])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _share(seconds: float | None, whole: float) -> str:
    return f"{seconds * 1e3:.2f} {seconds / (whole or 1.0):4.0%}" if seconds is not None else "-"
