"""Where a recorded step goes, on the card and on the host: what stands between it and its limit.

PYTHONPATH=src python3 bench/gpu_profile.py

For the MLP and ResNet-18 of gpu.py: the bare step as a graph and ours, by the wall clock; what the card does in a step,
by torch's profiler; and what the host does in one of ours. Then what input and output add to a bare replay, by hand.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpu_racers as racers
import gpu_works as works
import torch
from gpu_racers import Racer
from torch.profiler import ProfilerActivity, profile

from evenstep.distributed.devices import facts
from evenstep.training.cuda_graphs.graph import Captured, Pending
from evenstep.training.cuda_graphs.runner import Fast

DEVICE = torch.device("cuda:0")
PARTS = ((Captured, "fill"), (Captured, "replay_whole"), (Pending, "arrive"), (Fast, "take"))
LARGEST = 12
REPEATS = 3


def microseconds(advance: Callable[[int], None], steps: int) -> float:
    """Of a step, the card included; the median of a few blocks."""
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        advance(steps)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / steps * 1e6)
    return sorted(found)[REPEATS // 2]


def show_gpu(name: str, racer: Racer, steps: int = 10) -> None:
    """What the card does in a step, the largest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        racer.advance(steps)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    kinds: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kinds[event.name[:80]].append(event.device_time)
    busy = sum(map(sum, kinds.values())) / steps
    print(f"{name}: {len(events) / steps:.0f} operations on the card in a step, {busy:.0f} us in all")
    for kind, times in sorted(kinds.items(), key=lambda item: -sum(item[1]))[:LARGEST]:
        print(f"    {sum(times) / steps:7.1f} us  {len(times) / steps:5.1f} x  {kind}")


@contextmanager
def timed(where: type, name: str, spent: dict[str, float]) -> Iterator[None]:
    """Inside, seconds of every call of a method are added up."""
    real = getattr(where, name)

    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return real(*arguments)
        finally:
            spent[f"{where.__name__}.{name}"] += time.perf_counter() - began

    setattr(where, name, call)
    try:
        yield
    finally:
        setattr(where, name, real)


def show_host(racer: Racer, steps: int) -> None:
    """What the host does in a step of ours; `Pending.arrive` is waiting for the card."""
    for where, name in PARTS:
        spent: dict[str, float] = defaultdict(float)
        with timed(where, name, spent):
            racer.advance(steps)
        print("    host: " + ", ".join(f"{one} {seconds / steps * 1e6:.1f} us" for one, seconds in spent.items()))


def show_by_hand(bare: Racer) -> None:
    """What a copy in (which samples) and a copy out (the loss) add to a bare replay."""
    on_gpu, index = torch.zeros((), device=DEVICE), torch.zeros(512, dtype=torch.int64, device=DEVICE)
    pageable = torch.zeros(512, dtype=torch.int64)
    hosts = [torch.empty((), pin_memory=True) for _ in range(4)]
    events = [torch.cuda.Event() for _ in range(4)]

    def steps(copies_in: bool, copies_out: bool) -> Callable[[int], None]:
        def advance(num: int) -> None:
            for number in range(num):
                if copies_in:
                    index.copy_(pageable, non_blocking=True)
                bare.advance(1)
                if copies_out:
                    hosts[number % 4].copy_(on_gpu, non_blocking=True)
                    events[number % 4].record()
                    events[(number - 2) % 4].synchronize()

        return advance

    for copies_in, copies_out in ((False, False), (True, False), (False, True), (True, True)):
        took = microseconds(steps(copies_in, copies_out), 2000)
        print(f"    by hand: copy in {copies_in}, copy out {copies_out}: {took:.0f} us")


def main() -> None:
    print(facts())
    for work, steps in ((works.mlp(DEVICE), 2000), (works.resnet18(DEVICE), 100)):
        bare, ours = racers.graph(work, False), racers.ours(work)
        ours.advance(200)
        print(f"\n{work.name}: bare {microseconds(bare.advance, steps):.0f} us, ours", end=" ")
        print(f"{microseconds(ours.advance, steps):.0f} us a step by the wall clock")
        # Before the profiler, which leaves the host slower than it was.
        if steps > 1000:
            show_by_hand(bare)
        show_host(ours, steps)
        show_gpu("bare", bare)
        show_gpu("ours", ours)
        ours.close()
        bare.close()


if __name__ == "__main__":
    main()
