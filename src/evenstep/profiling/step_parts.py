"""Times the parts of steps: when each began, on the host and on each replica, and what was sent.

`Timer` listens to the spans of some steps. `RankSpans` is what it found on one rank, from which the parts of a typical
step and the timeline of one step of all ranks are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch

from evenstep.distributed.step_spans import HOST, Listener, lane
from evenstep.record import PARTS, Lane, Timeline

COMMUNICATION = "communication"
_PART_OF = {"replicate": COMMUNICATION, "reduce": COMMUNICATION} | {part: part for part in PARTS}
"""The part of a step to which each span belongs."""

Timestamp = float | torch.cuda.Event


class Timer(Listener):
    """Notes when each part begins; on a GPU in the time of the device, which the host runs ahead of."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.sent_bytes = 0
        self._parts: list[tuple[str, str, Timestamp]] = []
        """Lane, name and begin."""
        self._transfers: list[tuple[str, Timestamp, Timestamp]] = []
        self._current = ""
        self._on_gpu = devices[0].type == "cuda"
        self._clocks = {device: _start_clock(device) for device in devices if self._on_gpu}

    def part(self, name: str) -> None:
        # After `stop`, a pause announces the phase before it again, which belongs to no step.
        if name in _PART_OF and (self._current or name == STEP):
            self._current = name
            self._parts.append((lane(), name, self._now()))

    def leave(self) -> None:
        if lane() != HOST:
            self._parts.append((lane(), "", self._now()))

    def stop(self) -> None:
        """End the current step: what follows, up to the next input, belongs to none."""
        self._current = ""
        self._parts.append((HOST, "", self._now()))

    def send(self, name: str, tensors: Sequence[torch.Tensor], waits: bool) -> Callable[[], None]:
        begin, before = self._now(), self._current
        self.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        # On a GPU a collective is only started here, and the device waits for it.
        is_exposed = waits and bool(before) and not self._on_gpu
        if is_exposed:
            self.part(COMMUNICATION)

        def arrived() -> None:
            self._transfers.append((name, begin, self._now()))
            if is_exposed:
                self.part(before)

        return arrived

    def read(self) -> RankSpans:
        """What was timed; waits for the devices."""
        for device in self._clocks:
            torch.cuda.synchronize(device)
        begins: dict[str, list[tuple[str, float]]] = {HOST: []}
        for where, name, timestamp in self._parts:
            begins.setdefault(where, []).append((name, self._seconds(timestamp)))
        lanes = {where: spans_of(of_lane) for where, of_lane in begins.items()}
        network = [(name, self._seconds(begin), self._seconds(end)) for name, begin, end in self._transfers]
        return RankSpans(lanes.pop(HOST), dict(sorted(lanes.items())), network)

    def _now(self) -> Timestamp:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, timestamp: Timestamp) -> float:
        """On the clock that all processes of a machine share."""
        if isinstance(timestamp, float):
            return timestamp
        started, event = self._clocks[timestamp.device]
        return started + float(event.elapsed_time(timestamp)) / 1000


def _start_clock(device: torch.device) -> tuple[float, torch.cuda.Event]:
    """The same time on the host and on a GPU."""
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return time.perf_counter(), event


Span = tuple[str, float, float]
"""Name, begin and end; in seconds."""
STEP = "input"
"""The first part of every step."""


@dataclass(frozen=True)
class RankSpans:
    """The timed steps of one rank: the spans of each lane, in order."""

    host: list[Span]
    replicas: dict[str, list[Span]]
    """Those of each replica, where one process drives several."""
    network: list[Span]

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Begin and end of each step."""
        found: list[tuple[float, float]] = []
        for name, begin, end in self.host:
            if name == STEP:
                found.append((begin, end))
            elif found:
                found[-1] = (found[-1][0], end)
        return found

    def parts(self, begin: float, end: float) -> dict[str, float]:
        """Seconds of this time in each part of a step; they add up to all of it."""
        found = dict.fromkeys(PARTS, 0.0)
        for name, since, until in within(self.host, begin, end):
            found[_PART_OF[name]] += until - since
        if self.replicas:
            # While the replicas compute, the host waits for them.
            spans = [span for replica in self.replicas.values() for span in within(replica, begin, end)]
            forward, backward = (_seconds(spans, name) for name in ("forward", "backward"))
            computing = found["forward"] + found["backward"]
            found["forward"] = computing * forward / (forward + backward or 1.0)
            found["backward"] = computing - found["forward"]
        return found

    def lanes(self, rank: int, begin: float, end: float, since: float) -> list[Lane]:
        """The lanes with spans in this time, which is counted from `since`."""
        every = {"host": self.host, **self.replicas, "network": self.network}
        shown = {name: within(spans, begin, end) for name, spans in every.items()}
        return [
            Lane(rank=rank, name=name, spans=[(what, first - since, last - since) for what, first, last in spans])
            for name, spans in shown.items()
            if spans
        ]


def spans_of(begins: Sequence[tuple[str, float]]) -> list[Span]:
    """Each lasts until another one begins; one without a name only ends the previous one."""
    changes = [one for index, one in enumerate(begins) if index == 0 or one[0] != begins[index - 1][0]]
    return [(name, begin, end) for (name, begin), (_, end) in pairwise(changes) if name]


def within(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """The spans between two timestamps, cut at both."""
    cut = ((name, max(first, begin), min(last, end)) for name, first, last in spans)
    return [span for span in cut if span[1] < span[2]]


def usual_parts(ranks: Sequence[RankSpans]) -> dict[str, float]:
    """Seconds of a usual step in each part: the mean over ranks and over the middle half of the steps by length."""
    kept = [rank.parts(*step) for rank in ranks for step in middle_half(rank.steps)]
    return {name: fmean(parts[name] for parts in kept) if kept else 0.0 for name in PARTS}


def middle_half(steps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the shortest and the longest quarter, in which the machine did something else."""
    ordered = sorted(steps, key=lambda step: step[1] - step[0])
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def timeline(ranks: Sequence[RankSpans], index: int, number: int) -> Timeline:
    """One step of all ranks: the `index`-th that was timed, which is step `number` of the training."""
    steps = [rank.steps[index] for rank in ranks]
    since = min(begin for begin, _ in steps)
    lanes = [spans.lanes(rank, *steps[rank], since) for rank, spans in enumerate(ranks)]
    return Timeline(step=number, lanes=[one for of_rank in lanes for one in of_rank])


def _seconds(spans: Iterable[Span], name: str) -> float:
    return sum(end - begin for of_span, begin, end in spans if of_span == name)
