"""The seconds of a step on n devices, part by part: arithmetic alone.

compute      a fixed part, and a part for each sample of a device's share
communication  a timeline: a bucket of gradients starts at max(ready, end of the one before)
handling     copying and summing gradients in a device's memory
stragglers   a synchronous step takes as long as its slowest rank: interruptions, and devices that differ
input        what a machine can read, shared by its devices
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

from evenstep.predict.communication_cost import Cluster
from evenstep.strategy_facts import StrategyFacts

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes of DDP's buckets."""
JITTER = 0.09
"""Standard deviation of a rank's step of one second, in seconds, if its host had one core for it.

Interruptions come at random: their number grows with the length of a step and falls with the cores for each rank, and
their standard deviation with the root of that. Chosen once for all published tables (see published.py); measured ranks
have their own."""
CPU_JITTER = 0.01
"""The same of CPU ranks whose steps were not timed, as those of bench/c8_predict.py have it."""
DEVIATION = 0.03
"""Standard deviation of the speeds of equal GPUs; chosen as above. Clusters vary by 8 % (arXiv 2208.11035)."""
MOST_JITTER = 0.3
"""Of a step: a very short one is not all jitter."""
TIME_SLICE = 0.75e-3
"""Seconds, of Linux's scheduler on one core; on more it grows with their logarithm, up to 8."""
MOST_UNITS = 48
BACKWARD = 2 / 3
"""Of forward and backward, where it was not measured."""
LIMITS = ("compute", "communication", "bubble", "stragglers", "input", "unexplained")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A task on one device, as measured or as published."""

    fixed_seconds: float
    """Of a step, however small its batch: kernel launches, the host's work."""
    sample_seconds: float
    """Of forward and backward, for each sample."""
    exponent: float = 1.0
    """Of the number of samples: above 1 where each costs more in a larger batch."""
    optimizer_seconds: float = 0.0
    backward: float = BACKWARD
    """Its part of forward and backward."""
    input_seconds: float = 0.0
    """Waiting for a batch, for each sample."""
    gradient_bytes: float = 0.0
    arrivals: tuple[float, ...] = ()
    """When each bucket is ready, as a part of backward; evenly, if empty."""
    accumulate: int = 1
    jitter: float = JITTER
    """Of a step of one second; with `host_cores`, of one on a host with one core for each rank."""
    host_cores: float | None = None
    """For each rank of a full machine; None where jitter was measured."""
    deviation: float = 0.0
    """Standard deviation of the speeds of its devices, as a part of a step."""
    handling_seconds: float = 0.0
    """Copying and summing gradients in a device's memory, which communication needs on two devices or more."""
    contention: float = 0.0
    """Seconds that a second of hidden communication takes from computing."""
    samples_a_second: float | None = None
    """That a machine can read; None where nobody measured it."""
    cores: int | None = None
    """Of a machine whose devices are CPU processes, which share them."""
    threads: int = 1
    shares_memory: bool = False
    """Whether ranks of one machine average gradients in shared memory, after backward."""

    def compute_seconds(self, samples: float) -> float:
        """Of forward and backward on one device."""
        return self.fixed_seconds + self.sample_seconds * math.pow(samples, self.exponent)


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The seconds of a step; they add up to it."""

    input: float
    forward: float
    backward: float
    communication: float
    """Not hidden behind backward."""
    handling: float
    """Of gradients in the device's memory."""
    contention: float
    stragglers: float
    optimizer: float
    waiting: float
    """For what a machine cannot read any faster."""
    bubble: float = 0.0
    """In which a rank of a pipeline waits until others have computed; the mean of all ranks."""
    unexplained: float = 0.0
    """What a measured step on fewer devices took beyond the model."""
    hidden: float = 0.0
    """Communication behind backward; not a part of the sum."""
    buckets: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """Begin and end of each, in seconds since the step began."""

    @property
    def seconds(self) -> float:
        sending = self.communication + self.handling + self.contention
        waited = self.bubble + self.stragglers + self.waiting
        return computing_of(self) + sending + waited + self.unexplained


@cache
def slowest_of(ranks: int) -> float:
    """How many standard deviations the slowest of n ranks is behind the mean (Blom's approximation).

    >>> round(slowest_of(1), 2), round(slowest_of(8), 2), round(slowest_of(1024), 2)
    (0.0, 1.43, 3.23)
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def slowest_device_of(devices: int) -> float:
    """The same for the speeds of n devices, which are within bounds: the largest of n even draws.

    >>> round(slowest_device_of(1), 2), round(slowest_device_of(8), 2), round(slowest_device_of(1024), 2)
    (0.0, 1.35, 1.73)
    """
    return math.sqrt(3) * (devices - 1) / (devices + 1)


def stragglers_seconds(work: Workload, seconds: float, devices: int) -> float:
    """How long ranks that compute for `seconds` wait for the slowest one."""
    jitter = min(work.jitter * math.sqrt(seconds / (work.host_cores or 1)), MOST_JITTER * seconds)
    return math.hypot(jitter * slowest_of(devices), work.deviation * seconds * slowest_device_of(devices))


def buckets_of(num_bytes: float) -> list[float]:
    """Sizes of the buckets into which DDP packs gradients, in the order of their arrival.

    >>> buckets_of(60 * 2**20) == [2**20, 25 * 2**20, 25 * 2**20, 9 * 2**20]
    True
    """
    sizes: list[float] = []
    left = num_bytes
    while left > 0:
        sizes.append(min(left, BUCKET if sizes else FIRST_BUCKET))
        left -= sizes[-1]
    return sizes


def num_units(num_bytes: float) -> int:
    """How many units fully_shard wraps: layers, which are larger than buckets in a large model."""
    return max(1, min(MOST_UNITS, round(num_bytes / BUCKET)))


def timeline(ready: Sequence[float], costs: Sequence[float]) -> list[tuple[float, float]]:
    """Begin and end of each message of one link: it starts at max(ready, end of the one before).

    >>> timeline([1.0, 2.0, 3.0], [2.0, 0.5, 1.0])
    [(1.0, 3.0), (3.0, 3.5), (3.5, 4.5)]
    """
    spans: list[tuple[float, float]] = []
    end = 0.0
    for moment, cost in zip(ready, costs, strict=True):
        begin = max(moment, end)
        end = begin + cost
        spans.append((begin, end))
    return spans


def step_parts(work: Workload, strategy: StrategyFacts, cluster: Cluster, devices: int, samples: float) -> StepParts:
    """A step of `samples` in all, over `devices`."""
    share = samples / devices
    sharing = cores_shared(work, cluster.in_a_machine(devices))
    computing = work.compute_seconds(share) * sharing
    optimizer = work.optimizer_seconds * sharing / (devices if strategy.shards else 1)
    backward = computing * work.backward
    forward, reading = computing - backward, work.input_seconds * share
    spans, exposed = _communication(work, strategy, cluster, devices, (forward, backward))
    hidden = max(0.0, sum(end - begin for begin, end in spans) - exposed)
    parts = StepParts(
        input=reading,
        forward=forward,
        backward=backward,
        communication=exposed,
        handling=work.handling_seconds if devices > 1 and not strategy.is_reference else 0.0,
        contention=work.contention * hidden,
        stragglers=stragglers_seconds(work, computing + optimizer, devices)
        + _turn_seconds(work, cluster.in_a_machine(devices)),
        optimizer=optimizer,
        waiting=0.0,
        hidden=hidden,
        buckets=tuple((reading + begin, reading + end) for begin, end in spans),
    )
    return with_ceiling(parts, work, samples / cluster.machines(devices))


def with_ceiling(parts: StepParts, work: Workload, samples_of_machine: float) -> StepParts:
    """What a machine can read is shared by its devices."""
    if work.samples_a_second is None:
        return parts
    waiting = max(0.0, samples_of_machine / work.samples_a_second - parts.seconds)
    return StepParts(**{**vars(parts), "waiting": waiting})


def cores_shared(work: Workload, in_a_machine: int) -> float:
    """How much slower the slowest of CPU processes is that have fewer cores than threads.

    Half way between cores that are shared evenly and ranks that stay where they are: when a core is done, the kernel
    moves one of those that share another one, but late.

    >>> work = Workload(fixed_seconds=1.0, sample_seconds=0.0, cores=2)
    >>> [cores_shared(work, ranks) for ranks in (1, 2, 3, 4)]
    [1.0, 1.0, 1.75, 2.0]
    """
    threads_a_core = in_a_machine * work.threads / work.cores if work.cores else 1.0
    return (threads_a_core + math.ceil(threads_a_core)) / 2 if threads_a_core > 1 else 1.0


def _turn_seconds(work: Workload, in_a_machine: int) -> float:
    """Ranks that share a core are done a time slice of the kernel apart."""
    is_shared = work.cores and cores_shared(work, in_a_machine) > 1
    return TIME_SLICE * (1 + int(math.log2(min(work.cores or 1, 8)))) if is_shared else 0.0


def _communication(
    work: Workload, strategy: StrategyFacts, cluster: Cluster, devices: int, passes: tuple[float, float]
) -> tuple[list[tuple[float, float]], float]:
    """Spans on the network, and the seconds of them that a step waits for."""
    if devices == 1 or not work.gradient_bytes or strategy.is_reference:
        return [], 0.0
    # Only the last micro-batch sends.
    forward, backward = (seconds / work.accumulate for seconds in passes)
    before = sum(passes) - forward - backward
    if strategy.shards:
        return _sharded(work, cluster, devices, (forward, backward))
    if not strategy.processes_per_device:
        return _driven(work, cluster, devices, sum(passes))
    if work.shares_memory and cluster.machines(devices) == 1:
        # The ranks' own cores copy and sum.
        cost = cluster.inside.ring(devices, work.gradient_bytes) * cores_shared(work, devices)
        return [(sum(passes), sum(passes) + cost)], cost
    sizes = buckets_of(work.gradient_bytes)
    ready = [before + forward + backward * part for part in _arrivals(work, sizes)]
    spans = timeline(ready, [cluster.all_reduce(devices, size) for size in sizes])
    return spans, max(0.0, spans[-1][1] - sum(passes))


def _arrivals(work: Workload, sizes: Sequence[float]) -> list[float]:
    """A bucket is ready when its last gradient is; the last one when backward ends."""
    if len(work.arrivals) == len(sizes):
        return list(work.arrivals)
    done, found = 0.0, []
    for size in sizes:
        done += size
        found.append(done / work.gradient_bytes)
    return found


def _sharded(
    work: Workload, cluster: Cluster, devices: int, passes: tuple[float, float]
) -> tuple[list[tuple[float, float]], float]:
    """Parameters are gathered unit by unit in forward and again in backward, gradients are scattered.

    The next unit is gathered while this one computes. Accumulated micro-batches gather too: each is one such pass.
    """
    sizes = [work.gradient_bytes / num_units(work.gradient_bytes)] * num_units(work.gradient_bytes)
    gather = [cluster.half(devices, size) for size in sizes]
    there = timeline([0.0] * len(sizes), gather)
    forward_end = _computed([end for _, end in there], [passes[0] * size / work.gradient_bytes for size in sizes])
    back = timeline([forward_end] * len(sizes), gather)
    computing = [passes[1] * size / work.gradient_bytes for size in sizes]
    backward_end = _computed([end for _, end in back], computing, forward_end)
    # Gathers of the next unit come first, so gradients are sent after the last gather or when they are ready.
    ready = [max(back[-1][1], end + sum(computing[: at + 1])) for at, (_, end) in enumerate(back)]
    scattered = timeline(ready, gather)
    end = max(backward_end, scattered[-1][1])
    exposed = max(0.0, end - sum(passes)) + (work.accumulate - 1) * max(0.0, backward_end - sum(passes))
    return [*there, *back, *scattered], exposed


def _computed(ready: Sequence[float], seconds: Sequence[float], begin: float = 0.0) -> float:
    """When the last unit is computed: each needs its parameters, and the unit before it."""
    end = begin
    for moment, cost in zip(ready, seconds, strict=True):
        end = max(moment, end) + cost
    return end


def _driven(work: Workload, cluster: Cluster, devices: int, computed: float) -> tuple[list[tuple[float, float]], float]:
    """One process copies the weights to every device, and the gradients back: nothing overlaps."""
    link = cluster.inside
    cost = 2 * (link.latency + (devices - 1) * work.gradient_bytes / link.bandwidth)
    return [(computed, computed + cost)], cost


def computing_of(parts: StepParts) -> float:
    """What one device would do, too."""
    return parts.input + parts.forward + parts.backward + parts.optimizer


def limit_of(parts: StepParts, ideal: float) -> str:
    """Which of LIMITS costs most, against a step of `ideal` seconds that n devices take if they are n times as fast."""
    lost = {
        "compute": computing_of(parts) - ideal,
        "communication": parts.communication + parts.handling + parts.contention,
        "bubble": parts.bubble,
        "stragglers": parts.stragglers,
        "input": parts.waiting,
        "unexplained": parts.unexplained,
    }
    return max(lost, key=lost.__getitem__)
