"""Which rank is slow, and why: reported during training, from the time at which each rank reaches the collective.

Clocks of different machines need not agree. Every step ends at the same time for all ranks, so a rank is late by what
its own part (reading, computing) takes longer than on the other ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist

from evenstep.distributed.world import World

Reason = Literal["input", "compute"]
MIN_STEPS = 8
MIN_SECONDS = 0.02
MIN_PART = 0.3
"""A rank is late if that costs more than this part of every step, and more than MIN_SECONDS."""
REST_PART = 0.6
"""If the time after the arrival exceeds this fraction of a step, the links are measured."""
PROBE_EVERY_SECONDS = 300.0
SAMPLE_STEPS = 64
PROBE_BYTES = 2**18
ROUNDS = 30
SPEND_SECONDS = 0.5
SPEND_SECONDS_TOGETHER = 10.0
"""No further round is started when one link, or its part of all of them, has taken this long."""
ENOUGH = 1e9
"""Bits per second from which a link is fast enough not to be measured again."""
SLOW = 200e6
"""Bits per second under which a link may be called slow."""
TIMES_SLOWER = 3


@dataclass(frozen=True)
class RankTimes:
    """One rank's seconds per step since the last judgement: means, and medians of its latest steps."""

    steps: float
    input: float
    compute: float
    rest: float
    median_input: float
    median_compute: float
    median_own: float
    since_probe: float = 0.0
    """Seconds since this rank last took part in a probe of the links."""

    @property
    def own(self) -> float:
        return self.input + self.compute

    @property
    def whole(self) -> float:
        return self.own + self.rest


@dataclass(frozen=True)
class Straggler:
    """A rank that delays all others at every step."""

    rank: int
    reason: Reason
    seconds: float
    own_seconds: float
    others_seconds: float

    def sentence(self) -> str:
        return (
            f"rank {self.rank} is slow: {self.seconds * 1e3:.0f} ms late in every step, due to {self.reason} "
            f"(its own {self.own_seconds * 1e3:.0f} ms against {self.others_seconds * 1e3:.0f} ms on the others)"
        )


class StragglerMonitor:
    """This rank's times, and the verdict over those of all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._reported: dict[tuple[int, str], float] = {}
        self._probed_at = -PROBE_EVERY_SECONDS
        self._forget()

    def add(self, input_seconds: float, compute_seconds: float, rest_seconds: float) -> None:
        """One step: waiting for the batch, from there to the first collective, and from there to the end."""
        self._steps += 1
        self._input += input_seconds
        self._compute += compute_seconds
        self._rest += rest_seconds
        self._sample.append((input_seconds, compute_seconds))

    def judge(self) -> str | None:
        """The line to log, the same on every rank, or None; all ranks call this after the same steps."""
        table = self._gather()
        if min(row.steps for row in table) < MIN_STEPS:
            return None
        self._forget()
        late = late_ranks(table)
        for one in late:
            if self._is_news(one.rank, one.reason, one.seconds):
                return one.sentence()
        return None if late or not needs_probe(table) else self._judge_links()

    def _forget(self) -> None:
        self._steps = 0
        self._input = self._compute = self._rest = 0.0
        self._sample: deque[tuple[float, float]] = deque(maxlen=SAMPLE_STEPS)

    def _gather(self) -> list[RankTimes]:
        """Every rank's row, in one message of 64 bytes each."""
        steps = max(self._steps, 1)
        sample = self._sample or [(0.0, 0.0)]
        mine = [
            float(self._steps),
            *(seconds / steps for seconds in (self._input, self._compute, self._rest)),
            *(median(column) for column in zip(*sample, strict=True)),
            median(map(sum, sample)),
            time.monotonic() - self._probed_at,
        ]
        own = torch.tensor(mine, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self._world.size)]
        dist.all_gather(rows, own)
        return [RankTimes(*row.tolist()) for row in rows]

    def _is_news(self, rank: int, reason: str, severity: float) -> bool:
        """Whether this is new, or twice as bad as when it was last reported; the same on every rank."""
        if severity < 2 * self._reported.get((rank, reason), 0.0):
            return False
        self._reported[rank, reason] = severity
        return True

    def _judge_links(self) -> str | None:
        found = judge_links(probe(self._world))
        # Twice in a row: on a busy machine everything is slow for short periods.
        again = judge_links(probe(self._world)) if found else None
        self._probed_at = time.monotonic()
        if found is None or again is None or again.rank != found.rank:
            return None
        return again.sentence() if self._is_news(again.rank, "network", 1 / again.rate) else None


def late_ranks(table: Sequence[RankTimes]) -> list[Straggler]:
    """The late ranks, the latest first: later than the others both in the mean and in the median over steps."""
    limit = max(MIN_PART * max(row.whole for row in table), MIN_SECONDS)
    late = [_lateness(table, rank) for rank in range(len(table))]
    return sorted((one for one in late if one and one.seconds > limit), key=lambda one: -one.seconds)


def _lateness(table: Sequence[RankTimes], rank: int) -> Straggler | None:
    row, others = table[rank], [other for number, other in enumerate(table) if number != rank]
    excess = row.own - median(other.own for other in others)
    usual_excess = row.median_own - median(other.median_own for other in others)
    seconds = min(excess, usual_excess)
    if seconds <= 0:
        return None
    others_input = median(other.median_input for other in others)
    others_compute = median(other.median_compute for other in others)
    if row.median_input - others_input > row.median_compute - others_compute:
        return Straggler(rank, "input", seconds, row.median_input, others_input)
    return Straggler(rank, "compute", seconds, row.median_compute, others_compute)


def needs_probe(table: Sequence[RankTimes]) -> bool:
    """Whether what comes after the arrival takes most of the step on all ranks, and no probe was made of late."""
    is_mostly_rest = all(row.rest > max(REST_PART * row.whole, MIN_SECONDS) for row in table)
    # Rank 0's clock decides: ranks that disagreed would wait for each other.
    return is_mostly_rest and table[0].since_probe >= PROBE_EVERY_SECONDS


@dataclass(frozen=True)
class SlowLink:
    """A rank that sends slowly; rank -1 stands for all of them, where they are alike."""

    rank: int
    rate: float
    others_rate: float

    def sentence(self) -> str:
        mine, theirs = (
            f"{rate / 1e6:.0f}" if rate >= 1e7 else f"{rate / 1e6:.1f}" for rate in (self.rate, self.others_rate)
        )
        if self.rank >= 0:
            return f"rank {self.rank} sends slowly: {mine} Mbit/s against {theirs} Mbit/s on the others (network)"
        return f"the links between the ranks are slow: {mine} to {theirs} Mbit/s (network)"


def probe(world: World) -> list[float]:
    """Bits per second from each rank to the next, in the order of ranks; all ranks call this together.

    One link at a time, and through gloo's CPU group: what travels on the network is this alone.
    """
    rate = 0.0
    for sender in range(world.size):
        receiver = (sender + 1) % world.size
        if world.rank == sender:
            rate = _send(receiver, min(SPEND_SECONDS, SPEND_SECONDS_TOGETHER / world.size))
        elif world.rank == receiver:
            _answer(sender)
    own = torch.tensor([rate], dtype=torch.float64)
    rates = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(rates, own)
    return [float(other) for other in rates]


def _send(receiver: int, spend_seconds: float) -> float:
    """The best of some rounds: a busy machine makes some slower than the link is, none faster."""
    answer = torch.empty(1, dtype=torch.int64)
    payload = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    started = time.perf_counter()
    best = 0.0
    for _ in range(ROUNDS):
        began = _announce(1, receiver, answer)
        dist.send(payload, receiver)
        dist.recv(answer, receiver)
        best = max(best, 8 * PROBE_BYTES / (time.perf_counter() - began))
        if best > ENOUGH or time.perf_counter() - started > spend_seconds:
            break
    _announce(0, receiver, answer)
    return best


def _announce(continues: int, receiver: int, answer: torch.Tensor) -> float:
    """Announce to the receiver whether another round follows; returns the time at which it knows."""
    dist.send(torch.tensor([continues]), receiver)
    dist.recv(answer, receiver)
    return time.perf_counter()


def _answer(sender: int) -> None:
    continues = torch.ones(1, dtype=torch.int64)
    payload = torch.empty(PROBE_BYTES, dtype=torch.uint8)
    while True:
        dist.recv(continues, sender)
        dist.send(continues, sender)
        if not continues.item():
            return
        dist.recv(payload, sender)
        dist.send(continues, sender)


def judge_links(rates: Sequence[float]) -> SlowLink | None:
    """The rank that sends much more slowly than the others; all ranks, if all are slow."""
    rank = min(range(len(rates)), key=lambda number: rates[number])
    others = median(rate for number, rate in enumerate(rates) if number != rank)
    if rates[rank] >= SLOW:
        return None
    if rates[rank] * TIMES_SLOWER < others:
        return SlowLink(rank, rates[rank], others)
    return SlowLink(-1, min(rates), max(rates)) if max(rates) < SLOW else None
