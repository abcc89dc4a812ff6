"""`--link auto`: measures the network, tries exact plans in the first steps, and keeps the fastest.

A trial is a step of the training like any other: all plans give the same gradients up to rounding. What is measured is
whole steps, so that overlap with backward, the input and a busy host count as they do afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from evenstep.distributed.world import World
from evenstep.link_method import LinkMethod, parse_link
from evenstep.strategies.compression import sent_share
from evenstep.strategies.ddp import BETWEEN_MACHINES_MB, DDPModel, Sending

WARM_UP, TIMED = 2, 4
"""Steps of a trial; in the first of them, DDP orders its buckets again."""
SMALL_MB, LARGE_MB = 1.0, 25.0
"""Of buckets, besides the usual ones."""
GAIN = 0.99
"""Another plan is taken only where it needs less than this part of what torch's own needs."""
PROBE_NUMBERS = 2**20
OFFERED = ("bf16", "powersgd:2", "topk:0.01", "local:50")


@dataclass(frozen=True)
class LinkSpeed:
    """Between machines, or between processes where each is alone on its own."""

    seconds: float
    """Of a small message."""
    bytes_per_second: float
    num: int
    """Of those that send."""

    def exchange_seconds(self, num_bytes: float, num_messages: float = 1) -> float:
        """Of all-reduces that wait for one another: each sends every byte about twice, less what is its own."""
        hops = 2 * (self.num - 1)
        return num_messages * hops * self.seconds + hops / self.num * num_bytes / self.bytes_per_second

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.2g} ms, {8e-6 * self.bytes_per_second:.3g} Mbit/s"


def measure_link(group: dist.ProcessGroup | None, num: int) -> LinkSpeed:
    """By all-reduces of a small and of a larger tensor; all members call this."""
    hops = 2 * (num - 1)
    small = min(_seconds(torch.zeros(1), group) for _ in range(5)) / hops
    large = torch.zeros(PROBE_NUMBERS)
    seconds = min(_seconds(large, group) for _ in range(2)) - hops * small
    return LinkSpeed(small, hops / num * large.nbytes / max(seconds, 1e-9), num)


def _seconds(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    began = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    return time.perf_counter() - began


@dataclass
class LinkTrial:
    """A plan that is tried."""

    label: str
    sending: Sending
    seconds: list[float] = field(default_factory=list)

    @property
    def typical(self) -> float:
        """Not the shortest: a rank that was behind has a short step, which says nothing about the plan."""
        return median(self.seconds[WARM_UP:])


def trials_of(hierarchical: Sending | None, num_bytes: int) -> list[LinkTrial]:
    """The exact plans; torch's own is the first, with which the others are compared."""
    sums = hierarchical.sums if hierarchical is not None else None
    where = "once for each machine" if sums is not None else "by every rank"
    sizes = [SMALL_MB, LARGE_MB] if hierarchical is None else [SMALL_MB, hierarchical.bucket_mb or LARGE_MB, LARGE_MB]
    # One bucket that holds it all is the best plan where latency counts; larger ones are the same.
    smaller = [size for size in sizes if size * 2**20 < num_bytes]
    useful = sizes[: len(smaller) + 1]
    others = [LinkTrial(f"sent {where}, buckets of {size:g} MB", Sending(sums, size)) for size in useful]
    return [LinkTrial("plain DDP", Sending()), *others]


class AutoModel(DDPModel):
    """torch's DDP at first; between steps, it is wrapped again for the next trial."""

    def __init__(self, model: nn.Module, world: World, hierarchical: Sending | None) -> None:
        super().__init__(model, world)
        sums = hierarchical.sums if hierarchical is not None else None
        num = len(sums.machines.groups) if sums is not None else world.size
        speed = None
        if sums is None or sums.group is not None:
            speed = measure_link(sums.group if sums is not None else None, num)
        # Rank 0 is a leader.
        self._speed = LinkSpeed(*world.gather([speed.seconds, speed.bytes_per_second, num] if speed else None)[0])
        self._num_bytes = sum(weight.nbytes for weight in self.weights if weight.requires_grad)
        self._trials = trials_of(hierarchical, self._num_bytes)
        self._current, self._began = 0, 0.0
        self._is_settled = False

    def sync_replicas(self, is_training: bool) -> None:
        if is_training and not self._is_settled and not self._world.communication.is_off:
            self._time_step()
        elif not is_training:
            # An evaluation is no part of a step.
            self._began = 0.0
        super().sync_replicas(is_training)

    def _time_step(self) -> None:
        """At the beginning of a step."""
        now, trial = time.perf_counter(), self._trials[self._current]
        if self._began:
            trial.seconds.append(now - self._began)
        if len(trial.seconds) >= WARM_UP + TIMED:
            self._next_trial()
        self._began = time.perf_counter()

    def _next_trial(self) -> None:
        self._current += 1
        if self._current < len(self._trials):
            self.wrap_again(self._trials[self._current].sending)
            return
        # What rank 0 measured counts for all.
        best = self._world.gather([trial.typical for trial in self._trials])[0]
        fastest = min(range(len(best)), key=best.__getitem__)
        chosen = fastest if best[fastest] < GAIN * best[0] else 0
        self.wrap_again(self._trials[chosen].sending)
        self._is_settled = True
        self.notes += self._report(best, chosen)

    def _report(self, best: Sequence[float], chosen: int) -> list[str]:
        tried = ", ".join(f"{trial.label} {1e3 * one:.4g} ms" for trial, one in zip(self._trials, best, strict=True))
        sent = f"{self._num_bytes / 1e6:.3g} MB of gradients"
        lines = [
            f"--link auto: {sent} between {self._speed.num} machines or processes ({self._speed}, measured). A step: "
            f"{tried}. Taken: {self._trials[chosen].label}"
        ]
        return lines + self._offer(best[chosen])

    def _offer(self, seconds: float) -> list[str]:
        """Methods that lose something, with what a step would take if all but the network stays as it is."""
        network = min(seconds, self._speed.exchange_seconds(self._num_bytes))
        estimates = {link: seconds - network + self._network_seconds(parse_link(link)) for link in OFFERED}
        faster = {link: one for link, one in estimates.items() if one < 0.9 * seconds}
        if not faster:
            return []
        listed = ", ".join(f"--link {link} about {1e3 * one:.3g} ms" for link, one in faster.items())
        return [f"inexact but faster (estimated): {listed}; evenstep compare --links shows their effect on the loss"]

    def _network_seconds(self, method: LinkMethod) -> float:
        shapes = [tuple(weight.shape) for weight in self.weights if weight.requires_grad]
        sent = self._num_bytes * sent_share(method, shapes, self._speed.num)
        return self._speed.exchange_seconds(sent, dependent_messages(method, self._num_bytes))


def dependent_messages(method: LinkMethod, num_bytes: int) -> float:
    """How many all-reduces of a step wait for one another; where latency counts, they cost more than their bytes.

    >>> dependent_messages(LinkMethod("powersgd", 2), 20 * 2**20), dependent_messages(LinkMethod("local", 50), 1)
    (10, 0.02)
    """
    if method.is_local:
        return 1 / method.num_steps
    num_buckets = math.ceil(num_bytes / (BETWEEN_MACHINES_MB * 2**20))
    return 2 * num_buckets if method.name in ("powersgd", "topk") else 1
