"""`train --profile`: the traces of all ranks as one timeline, and the parts of a step computed from it.

`merge` writes one trace with a process per rank and lanes for input, compute, communication and CUDA streams.
`numbers("runs/NAME/trace.json.gz")` assigns every instant of a step to one part. On a GPU that is the part of the
kernel that runs; communication where data is sent and nothing is computed; and what the host does while the GPU idles.
On a CPU the host computes.
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
from evenstep.record import PARTS

Span = tuple[float, float]
"""Begin and end, in whatever unit both have."""


def span_of(event: Mapping[str, Any]) -> Span:
    """When an event of a trace began and ended."""
    return event["ts"], event["ts"] + event["dur"]


def union(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """The same time as sorted spans without overlap; spans with at most `gap` between them are joined."""
    joined: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and begin <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The intersection; both are results of `union`."""
    found: list[Span] = []
    here = there = 0
    while here < len(some) and there < len(others):
        begin, end = max(some[here][0], others[there][0]), min(some[here][1], others[there][1])
        if begin < end:
            found.append((begin, end))
        if some[here][1] < others[there][1]:
            here += 1
        else:
            there += 1
    return found


def without(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The first without the second; both are results of `union`."""
    if not some:
        return []
    ends = [some[0][0], *(edge for span in others for edge in span), max(some[-1][1], some[0][0])]
    between = [(ends[index], ends[index + 1]) for index in range(0, len(ends), 2)]
    return common(some, [span for span in between if span[0] < span[1]])


def length(spans: Iterable[Span]) -> float:
    """The total time of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def holds(spans: Sequence[Span], begin: float, end: float) -> bool:
    """Whether one of the spans, a result of `union`, contains the interval."""
    place = bisect_right(spans, (begin, float("inf"))) - 1
    return place >= 0 and begin < spans[place][1] and end <= spans[place][1]


Event = dict[str, Any]

PREFIX = "evenstep: "
"""What begins the name of every span that evenstep itself marks; the workers write it."""
STEP, TOGETHER = f"{PREFIX}step ", f"{PREFIX}together"
SENDING = (f"{PREFIX}replicate", f"{PREFIX}reduce")
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

    def marked(self, *prefixes: str) -> list[Event]:
        return [event for event in self.events if is_mark(event) and event["name"].startswith(prefixes)]


def merge(traces: Sequence[RankTrace], path: Path) -> None:
    """Write the timelines of all ranks as one file, which Perfetto and chrome://tracing open as it is."""
    ranks = _read(traces)
    begins = [event["ts"] for rank in ranks for event in rank.marked(STEP)]
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
        raise BadInput(f"{path} is no trace ({type(error).__name__}: {error}); --profile writes one") from error
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
        left[rank.machine] += [event["ts"] + event["dur"] for event in rank.marked(TOGETHER)]
    first = left[ranks[0].machine]
    return {machine: median(times) - median(first) if times and first else 0.0 for machine, times in left.items()}


def _into_lanes(rank: _Rank) -> None:
    """Give every event the rank as its process and a lane as its thread."""
    steps = rank.marked(STEP)
    main = (steps[0]["pid"], steps[0]["tid"]) if steps else None
    kinds = _kinds(rank, main)
    inputs = union(span_of(event) for event in rank.marked(f"{PREFIX}input") if _thread(event) == main)
    sending = union(span_of(event) for event in rank.marked(*SENDING) if _thread(event) == main)
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
        place, name = _thread(event), str(event.get("name"))
        if event["ph"] != "X" or place == main:
            continue
        if event["pid"] != host:
            kinds.setdefault(place, f"cuda:{event['pid']} stream {event['tid']}")
            if is_nccl(name) and not kinds[place].endswith(COMMUNICATION):
                kinds[place] += f", {COMMUNICATION}"
        elif name.startswith("gloo:"):
            kinds[place] = COMMUNICATION
        elif name.startswith((PREFIX, "autograd::engine")):
            kinds.setdefault(place, COMPUTE)
    return kinds


def _thread(event: Event) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


def is_mark(event: Event) -> bool:
    """Whether evenstep marked this on the host; the profiler gives GPU spans the same names."""
    return event.get("cat") == "user_annotation" and str(event["name"]).startswith(PREFIX)


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


FILE, NUMBERS = "trace.json.gz", "numbers.json"
HOST_PARTS = tuple(part for part in PARTS if part != COMMUNICATION)
SMALL_GAP = 50.0
"""Microseconds between operations in which a CPU still counts as computing: the overhead of autograd."""
_NO_COMPUTING = ("c10d::", "autograd::", "torch::autograd::", "_c10d_functional::")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
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
    """Seconds of a step in each of PARTS; communication is what does not overlap with computing."""
    communication_seconds: float
    """Seconds of a step with communication, overlapped or not."""

    @property
    def accounted(self) -> float:
        """The share of the step that its parts account for."""
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
    """Write the numbers as JSON."""
    path.write_text(json.dumps({"unit": "seconds", "ranks": [asdict(one) for one in found]}, indent=1) + "\n")


def lines(found: Sequence[RankNumbers]) -> list[str]:
    """A table with a row for each rank: milliseconds and shares of the step."""
    titles = ["rank", "step ms", *("not hidden" if part == COMMUNICATION else part for part in PARTS)]
    rows = [titles]
    for one in found:
        shares = [f"{one.parts[part] * 1e3:.2f} {one.parts[part] / one.step_seconds:4.0%}" for part in PARTS]
        rows.append([str(one.rank), f"{one.step_seconds * 1e3:.2f}", *shares])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _rank_numbers(rank: int, events: list[Event]) -> RankNumbers:
    lanes = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    activity = _RankActivity([event for event in events if event["ph"] == "X"], lanes)
    steps = [span_of(event) for event in activity.marks if event["name"].startswith(STEP)]
    every = free = union(steps)
    in_seconds = 1e6 * max(1, len(steps))
    parts = dict.fromkeys(PARTS, 0.0)
    for part, claimed in activity.claims():
        parts[part] += length(common(free, claimed)) / in_seconds
        free = without(free, claimed)
    return RankNumbers(
        rank=rank,
        steps=len(steps),
        step_seconds=length(every) / in_seconds,
        parts=parts,
        communication_seconds=length(common(every, activity.communicating())) / in_seconds,
    )


class _RankActivity:
    """What one rank did, by part of a step."""

    def __init__(self, spans: list[Event], lanes: Mapping[int, str]) -> None:
        self._spans = spans
        self._lanes = lanes
        self.marks = [event for event in spans if is_mark(event)]
        self._kernels = self._on_gpu(("kernel",))
        self._memory = self._on_gpu(_MEMORY)

    def claims(self) -> Iterator[tuple[str, list[Span]]]:
        """Spans of each part, by priority: the first part that covers an instant gets it."""
        yield COMMUNICATION, without(self.communicating(), self._computing())
        for on_gpu in (self._kernels, self._memory):
            for part in HOST_PARTS:
                yield part, union(on_gpu[part])
        # Where replicas have their own threads, the main thread waits for them, so its marks come last.
        for of_main in (False, True):
            marks = [event for event in self.marks if (self._lane(event) in _MAIN) is of_main]
            for part in HOST_PARTS:
                yield part, union(span_of(event) for event in marks if event["name"] == f"{PREFIX}{part}")

    def communicating(self) -> list[Span]:
        """When data is sent."""
        on_host = [span_of(event) for event in self._spans if self._lane(event).startswith(COMMUNICATION)]
        return union([*on_host, *self._kernels[COMMUNICATION], *self._memory[COMMUNICATION]])

    def _computing(self) -> list[Span]:
        """When this rank computes: its GPU, if it has one."""
        if any(self._kernels.values()):
            return union(span for part in HOST_PARTS for span in self._kernels[part])
        return union((span_of(event) for event in self._spans if self._is_computing(event)), SMALL_GAP)

    def _is_computing(self, event: Event) -> bool:
        # What has no namespace is a node of autograd: a function of the user's or of FSDP's, which may wait in it.
        is_operation = event.get("cat") == "cpu_op" and "::" in event["name"]
        return is_operation and not event["name"].startswith(_NO_COMPUTING) and self._lane(event).startswith(COMPUTE)

    def _lane(self, event: Event) -> str:
        return self._lanes.get(event["tid"], "")

    def _on_gpu(self, kinds: Sequence[str]) -> dict[str, list[Span]]:
        """What a GPU did, by what the host was doing when it launched it."""
        found: dict[str, list[Span]] = {part: [] for part in PARTS}
        launches = {_correlation(event): event for event in self._spans if event.get("cat") in _LAUNCHES}
        phases = _Phases(self.marks)
        for event in self._spans:
            if event.get("cat") in kinds:
                launch = launches.get(_correlation(event), event)
                part = COMMUNICATION if is_nccl(event["name"]) else phases.at(launch["tid"], launch["ts"])
                if part is not None:
                    found[part].append(span_of(event))
        return found


class _Phases:
    """What the host was doing at a time: the launching thread, or any other if that is one of autograd's."""

    def __init__(self, marks: list[Event]) -> None:
        self._of_lane: dict[Any, list[tuple[float, float, str]]] = {}
        parts = {f"{PREFIX}{part}": part for part in HOST_PARTS} | dict.fromkeys(SENDING, COMMUNICATION)
        for event in sorted(marks, key=lambda event: float(event["ts"])):
            if event["name"] in parts:
                for lane in (event["tid"], None):
                    self._of_lane.setdefault(lane, []).append((*span_of(event), parts[event["name"]]))

    def at(self, lane: int, time: float) -> str | None:
        """The part; None if nothing is marked there."""
        for phases in (self._of_lane.get(lane, []), self._of_lane.get(None, [])):
            place = bisect_right(phases, (time, float("inf")))
            # The last one that had begun: what was begun inside of another is more to the point.
            for _, end, part in reversed(phases[max(0, place - _NEAR) : place]):
                if time < end:
                    return part
        return None


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")
