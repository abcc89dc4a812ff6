"""What goes on inside the steps of this process, for whoever wants to know: its phases, and what travels meanwhile.

A tap is closed most of the time, and then costs nothing. Open, it notes the time at every change of phase; on a card
that is the device's time, not the host's. Muted, it has the strategies send nothing: what a step takes then is the
limit for every way of sending it.

From moments at which something began to spans, and from spans to the parts of a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from evenstep.distributed.heartbeat import PARTS as PART_OF_PHASE
from evenstep.distributed.heartbeat import Heartbeat
from evenstep.record import PARTS, Lane, Timeline

HOST = "host"
NETWORK = "network"

Moment = float | torch.cuda.Event


@dataclass(frozen=True)
class Mark:
    """From this moment on, a lane does what the name says."""

    lane: str
    name: str
    moment: Moment


@dataclass(frozen=True)
class Travel:
    """Something that was on its way from one moment to another."""

    name: str
    begin: Moment
    end: Moment


class Tap:
    """Of one process; every World has one."""

    def __init__(self) -> None:
        self.is_open = False
        self.is_muted = False
        self.marks: list[Mark] = []
        self.travels: list[Travel] = []
        self.sent_bytes = 0
        self._on_gpu = False
        self._begins: dict[torch.device, tuple[float, torch.cuda.Event]] = {}
        self._doing = ""

    def open(self, heartbeat: Heartbeat, devices: Sequence[torch.device]) -> None:
        """Begin to note what happens; each card has a clock of its own, which is set by the host's here."""
        self._on_gpu = devices[0].type == "cuda"
        for device in devices if self._on_gpu else ():
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self._begins[device] = (time.perf_counter(), event)
        self.is_open = True
        heartbeat.also(self._phase)

    def close(self, heartbeat: Heartbeat) -> None:
        """Note no more."""
        self.is_open = False
        heartbeat.also(None)

    def now(self) -> Moment:
        """This moment of the device's work."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Moment) -> float:
        """On the clock that all processes of this machine share; the device must have come past that moment."""
        if isinstance(moment, float):
            return moment
        begun, event = self._begins[moment.device]
        return begun + float(event.elapsed_time(moment)) / 1000

    def mark(self, name: str) -> None:
        """The thread that calls this begins to do something else."""
        if self.is_open:
            self._doing = name
            self.marks.append(Mark(_lane(), name, self.now()))

    def rest(self) -> None:
        """A device that is driven by a thread of its own has done its part of a step."""
        if self.is_open and _lane() != HOST:
            self.marks.append(Mark(_lane(), "", self.now()))

    @contextmanager
    def sending(self, name: str, num_bytes: int, then: str = "") -> Iterator[None]:
        """Around a collective that this process waits for; on a card it is only begun, and waited for by the card.

        What was done before goes on afterwards, unless it is said what comes then.
        """
        if not self.is_open:
            yield
            return
        begin, before = self.now(), then or self._doing
        self.sent_bytes += num_bytes
        if not self._on_gpu:
            self.mark("communication")
        yield
        self.travelled(name, begin)
        if not self._on_gpu:
            self.mark(before)

    def sent(self, tensors: Sequence[torch.Tensor], times: int = 1) -> None:
        """These were sent, each so many times."""
        if self.is_open:
            self.sent_bytes += times * size_of(tensors)

    def travelled(self, name: str, begin: Moment) -> None:
        """Something that was sent at `begin` has arrived now."""
        self.travels.append(Travel(name, begin, self.now()))

    def _phase(self, phase: int) -> None:
        if phase in PART_OF_PHASE:
            self.mark(PART_OF_PHASE[phase])


def _lane() -> str:
    """`seat 1` in the thread that drives it; whatever else runs (the engine's threads, too) is the host's."""
    thread = threading.current_thread().name
    return thread.partition("_")[0].replace("-", " ") if thread.startswith("seat-") else HOST


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


Span = tuple[str, float, float]
"""Name, begin and end; in seconds."""
STEP = "input"
"""What every step begins with."""
_PART_OF = {"replicate": "communication", "reduce": "communication"}


@dataclass(frozen=True)
class Noted:
    """What one rank noted of some steps: every lane's spans, one after another."""

    host: list[Span]
    replicas: dict[str, list[Span]]
    """Of the devices, where one process drives several."""
    network: list[Span]

    def to_json(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {"host": self.host, "seats": self.replicas, "network": self.network}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Noted:
        """What `to_json` wrote, perhaps on another rank."""
        replicas = {name: _spans(spans) for name, spans in values["seats"].items()}
        return cls(_spans(values["host"]), replicas, _spans(values["network"]))

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Begin and end of each step."""
        begins = [begin for name, begin, _ in self.host if name == STEP]
        return list(zip(begins, [*begins[1:], self.host[-1][2]], strict=True)) if begins else []

    def parts(self, begin: float, end: float) -> dict[str, float]:
        """Seconds of this time in each part of a step; they add up to all of it."""
        found = dict.fromkeys(PARTS, 0.0)
        for name, since, until in within(self.host, begin, end):
            found[_PART_OF.get(name, name)] += until - since
        if self.replicas:
            # While its devices compute, the host waits: how that time divides, they know.
            seconds = _seconds_by_name(
                span for replica in self.replicas.values() for span in within(replica, begin, end)
            )
            computing = found["forward"] + found["backward"]
            forward, backward = seconds.get("forward", 0.0), seconds.get("backward", 0.0)
            found["forward"] = computing * forward / (forward + backward or 1.0)
            found["backward"] = computing - found["forward"]
        return found

    def lanes(self, rank: int, begin: float, end: float, since: float) -> list[Lane]:
        """What is to be seen of this time, counted from `since`."""
        every = {"host": self.host, **self.replicas, "network": self.network}
        shown = {name: within(spans, begin, end) for name, spans in every.items()}
        return [
            Lane(rank=rank, name=name, spans=[(what, first - since, last - since) for what, first, last in spans])
            for name, spans in shown.items()
            if spans
        ]


def spans_of(marks: Sequence[tuple[str, float]]) -> list[Span]:
    """Each lasts until another one begins; the last one only ends the one before."""
    marks = [mark for index, mark in enumerate(marks) if index == 0 or mark[0] != marks[index - 1][0]]
    return [(name, begin, end) for (name, begin), (_, end) in pairwise(marks) if name]


def within(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """What of them lies between two moments."""
    cut = ((name, max(first, begin), min(last, end)) for name, first, last in spans)
    return [span for span in cut if span[1] < span[2]]


def usual_parts(ranks: Sequence[Noted]) -> dict[str, float]:
    """Seconds of a usual step in each part: the mean over ranks and over the middle half of the steps by length."""
    kept = [noted.parts(*step) for noted in ranks for step in middle_half(noted.steps)]
    return {name: fmean(parts[name] for parts in kept) if kept else 0.0 for name in PARTS}


def usual_seconds(ranks: Sequence[Noted]) -> float:
    """The whole of such a step, from when it begins to when the next one does."""
    kept = [end - begin for noted in ranks for begin, end in middle_half(noted.steps)]
    return fmean(kept) if kept else 0.0


def middle_half(steps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the shortest and the longest quarter, which tell of what else the machine did."""
    ordered = sorted(steps, key=lambda step: step[1] - step[0])
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def timeline(ranks: Sequence[Noted], index: int, number: int) -> Timeline:
    """One step of all ranks, the `index`-th that they noted, which was step `number` of the training."""
    times = [noted.steps[index] for noted in ranks]
    since = min(begin for begin, _ in times)
    lanes = [
        lane
        for rank, (noted, (begin, end)) in enumerate(zip(ranks, times, strict=True))
        for lane in noted.lanes(rank, begin, end, since)
    ]
    return Timeline(step=number, lanes=lanes)


def _seconds_by_name(spans: Iterable[Span]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, begin, end in spans:
        found[name] = found.get(name, 0.0) + end - begin
    return found


def _spans(values: Iterable[Sequence[Any]]) -> list[Span]:
    return [(str(name), float(begin), float(end)) for name, begin, end in values]
