"""What a usual network would gain over a link that `doctor` measured, before there is a task."""

from __future__ import annotations

import math

from evenstep.predict.communication_cost import CORES, Cluster, Link
from evenstep.predict.published import interval_of
from evenstep.predict.step_model import CPU_JITTER, DEVIATION, JITTER, StepParts, Workload, limit_of, step_parts
from evenstep.report.comparison import Range
from evenstep.report.prediction import KNEE, Expectation
from evenstep.strategy_facts import DEFAULT, STRATEGIES

PARAMETERS, STEP_SECONDS = 25_600_000, 0.1
"""ResNet-50; every device has as many samples as take so long on one."""
FARTHEST = 2**12


def expected_over(link: Link, devices: int, *, on_gpus: bool, shares_memory: bool = False) -> Expectation:
    """What N devices give over this link, and from how many on it is their limit."""
    cluster = Cluster(per_machine=FARTHEST, inside=link, between=link)
    work = Workload(
        fixed_seconds=STEP_SECONDS,
        sample_seconds=0.0,
        gradient_bytes=4.0 * PARAMETERS,
        jitter=JITTER if on_gpus else CPU_JITTER,
        host_cores=CORES["a100"] if on_gpus else None,
        deviation=DEVIATION if on_gpus else 0.0,
        shares_memory=shares_memory,
    )

    def step(number: int) -> StepParts:
        return step_parts(work, STRATEGIES[DEFAULT], cluster, number, number)

    middle = devices * STEP_SECONDS / step(devices).seconds
    low, high = interval_of(middle, math.log(devices / middle))
    counts = [2**power for power in range(1, FARTHEST.bit_length())]
    knee = next((number for number in counts if STEP_SECONDS / step(number).seconds < KNEE), None)
    return Expectation(
        devices=devices,
        times=Range(middle=middle, low=low, high=min(high, float(devices))),
        limit=limit_of(step(knee or devices), STEP_SECONDS),
        limit_from=knee,
    )


def link_of_pair(latency_seconds: float, bytes_per_second: float) -> Link:
    """Of an all-reduce of two ranks, whose smallest took so long: it passes a ring's two hops."""
    return Link(latency=latency_seconds / 2, bandwidth=bytes_per_second, name="measured by doctor")


def shared_memory(copy_bytes_per_second: float) -> Link:
    """Through which CPU ranks of one machine average: as fast as it copies."""
    return Link(latency=2e-5, bandwidth=copy_bytes_per_second, name="shared memory")
