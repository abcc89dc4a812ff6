"""What evenstep's eager step runs on the GPU beside a plain fused loop: kernels, copies, and gaps between them.

PYTHONPATH=src python3 bench/gpu_extra_kernels.py [vit] [lstm] [tables] [resnet18]      # under a minute for one

The plain loop is made twice, before and after ours: memory at other addresses alone changes a kernel's time, and a
difference between ours and the plain loop that is no larger than that between the two says nothing.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import gpu_racers as racers
import torch
from eager_step import WORKS
from gpu_profile import microseconds
from gpu_racers import Racer
from torch.profiler import ProfilerActivity, profile

from evenstep.distributed.devices import facts

WARM_UP, STEPS, TIMED = 60, 20, 60
GAP_US = 2.0
"""Shorter ones are between any two kernels of a stream."""
RAW, OURS, AGAIN = "plain", "ours", "plain, made again"


@dataclass
class Timeline:
    """What the GPU did, per step."""

    times: dict[str, list[float]]
    """Microseconds of each kernel or copy, by its name."""
    gap_us: float
    num_gaps: int
    span_us: float

    @property
    def busy_us(self) -> float:
        return sum(map(sum, self.times.values())) / STEPS

    @property
    def num(self) -> float:
        return sum(map(len, self.times.values())) / STEPS


def observed(racer: Racer) -> Timeline:
    """Profile some steps in the middle of others, so that the host is ahead from the first of them on."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        racer.advance(STEPS)
        torch.cuda.synchronize()
    return timeline([one for one in profiler.events() or [] if one.device_type == torch.autograd.DeviceType.CUDA])


def timeline(events: list[Any]) -> Timeline:
    """Of what ran on any stream: a gap is where nothing did."""
    times: dict[str, list[float]] = defaultdict(list)
    events = sorted(events, key=lambda one: one.time_range.start)
    gaps = []
    reached = events[0].time_range.start
    for event in events:
        times[event.name[:90]].append(event.time_range.end - event.time_range.start)
        gaps.append(max(0.0, event.time_range.start - reached))
        reached = max(reached, event.time_range.end)
    long = [gap for gap in gaps if gap > GAP_US]
    span = (reached - events[0].time_range.start) / STEPS
    return Timeline(times, sum(gaps) / STEPS, round(len(long) / STEPS), span)


def show(found: dict[str, Timeline]) -> None:
    for name, one in found.items():
        print(
            f"  {name:<18} {one.num:7.1f} operations, {one.busy_us:9.1f} us busy, {one.gap_us:8.1f} us of gaps "
            f"({one.num_gaps} longer than {GAP_US:.0f} us), {one.span_us:9.1f} us a step under the profiler"
        )
    print(f"  by name, where the number or the time differs: {RAW}, {OURS}, {AGAIN}")
    rows = []
    for name in dict.fromkeys(key for one in found.values() for key in one.times):
        of_name = [one.times.get(name, []) for one in found.values()]
        nums, sums = [len(of) / STEPS for of in of_name], [sum(of) / STEPS for of in of_name]
        if nums[0] != nums[1] or abs(sums[1] - sums[0]) > 1.0:
            rows.append((abs(sums[1] - (sums[0] + sums[2]) / 2), name, nums, sums))
    for _, name, nums, sums in sorted(rows, key=lambda row: -row[0])[:25]:
        cells = "  ".join(f"{num:5.1f} x {total:8.1f} us" for num, total in zip(nums, sums, strict=True))
        print(f"    {cells}  {name}")


def compare(name: str) -> None:
    work = WORKS[name][0](torch.device("cuda:0"))
    print(f"\n{work.name}")
    made: dict[str, Racer] = {}
    for label in (RAW, OURS, AGAIN):
        made[label] = racers.ours(work, fast="off") if label == OURS else racers.raw(work)
        made[label].advance(WARM_UP)
    for _ in range(2):
        # Before the profiler, which leaves the host slower than it was.
        took = {label: microseconds(racer.advance, TIMED) for label, racer in made.items()}
        print("  wall clock: " + ", ".join(f"{label} {us:.1f} us" for label, us in took.items()), flush=True)
    # Our optimizer step leaves the lists of its own to torch under a profiler, which wants torch's spans.
    with patch("evenstep.training.fused_optimizer.is_profiling", return_value=False):
        found = {}
        for label, racer in made.items():
            racer.advance(5)
            found[label] = observed(racer)
    show(found)
    for racer in made.values():
        racer.close()


def main() -> None:
    print(facts())
    for name in sys.argv[1:] or ["vit"]:
        compare(name)


if __name__ == "__main__":
    main()
