"""Timed all-reduces and copies: what a trial's processes run, and how all pairs of devices are tried in a minute."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from evenstep.distributed.worker_process import read_rank
from evenstep.distributed.world import World, backend_for, join_world
from evenstep.doctor.remedies import TimeBudget, Trial, is_sound, remedies, search, with_interface
from evenstep.doctor.sandbox import Ended, Job, Settings, try_out, try_together
from evenstep.private_apis import PrefixStore, TCPStore

SMALL_BYTES = 2**12
LARGE_BYTES = (2**18, 2**22, 2**26)
WARM_UP = 2
MAX_REPEATS = 50
SPEND_SECONDS = 0.3
"""For all repeats of one size."""
LONGEST_SECONDS = 1.0
"""A size expected to take longer than this is skipped."""
COPY_BYTES = 2**26


def add_up(devices: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """Join the group, all-reduce tensors of these sizes in bytes, and check every sum exactly."""
    world = join_world(devices, needs_group=True)
    rows: list[dict[str, Any]] = []
    copy_rate = bytes_per_second_of_copies(world.device)
    for num_bytes in sizes:
        if rows and rows[-1]["slowest_seconds"] * num_bytes / rows[-1]["num_bytes"] > LONGEST_SECONDS:
            break
        rows.append(_measured(world, num_bytes))
    return {"rows": rows, "copy_bytes_per_second": copy_rate}


def add_up_between(where: str, devices: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """The same with a process of another machine, through the prefix `where` of the rendezvous' store."""
    rank, size, _ = read_rank()
    # The store is the first launcher's, as that of a training is.
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if devices[0].startswith("cuda"):
        torch.cuda.set_device(devices[0])
    dist.init_process_group(backend_for(devices), store=PrefixStore(where, store), rank=rank, world_size=size)
    found = add_up(devices, sizes)
    # The first to leave would cut off data that the other has not read.
    dist.barrier()
    dist.destroy_process_group()
    return found


def _measured(world: World, num_bytes: int) -> dict[str, Any]:
    given = pattern(num_bytes, world.rank, world.device)
    summed = given.clone()
    dist.all_reduce(summed)
    is_right = torch.equal(summed.cpu(), expected_sum(num_bytes, world.size))
    seconds = _timed(world, lambda: dist.all_reduce(given))
    # Every repeat sums the result of the one before, so the last one shows any error.
    is_right &= torch.equal(given.cpu(), expected_sum(num_bytes, world.size, WARM_UP + len(seconds)))
    # All ranks decide by the same number whether to continue.
    slowest = torch.tensor([median(seconds)], dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {
        "num_bytes": num_bytes,
        "is_right": is_right,
        "median_seconds": median(seconds),
        "best_seconds": min(seconds),
        "slowest_seconds": float(slowest),
        "repeats": len(seconds),
    }


def _timed(world: World, step: Callable[[], object]) -> list[float]:
    """Seconds of each repeat, as many as fit the time on all ranks."""
    warm = [_seconds(world, step) for _ in range(WARM_UP)]
    longest = torch.tensor([warm[-1]], dtype=torch.float64, device=world.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    repeats = max(1, min(MAX_REPEATS, int(SPEND_SECONDS / max(float(longest), 1e-6))))
    return [_seconds(world, step) for _ in range(repeats)]


def _seconds(world: World, step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - began


def pattern(num_bytes: int, rank: int, device: torch.device) -> torch.Tensor:
    """Integers, different at every index and on every rank, whose sums are exact in float32."""
    indices = torch.arange(num_bytes // 4, device=device) % 8191
    return (indices + 10_000 * (rank + 1)).float()


def expected_sum(num_bytes: int, size: int, times: int = 1) -> torch.Tensor:
    """The sum of all ranks' patterns after `times` in-place all-reduces; exact for one rank and for two."""
    indices = torch.arange(num_bytes // 4) % 8191
    # Doubling changes only a float32's exponent, so 52 times lose no digits.
    return (indices * size + 10_000 * (size * (size + 1) // 2)).float() * float(size) ** (times - 1)


def bytes_per_second_of_copies(device: torch.device, other: torch.device | None = None) -> float:
    """The best speed of a few copies within this device, or to another."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=other or device)
    if other is not None and other.type == "cpu" and device.type == "cuda":
        target = target.pin_memory()
    best = 0.0
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        for one in {device, other or device}:
            if one.type == "cuda":
                torch.cuda.synchronize(one)
        best = max(best, COPY_BYTES / (time.perf_counter() - began))
    return best


def look_at_gpu(index: int) -> dict[str, Any]:
    """A GPU's properties and copy speeds, after a test computation."""
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    numbers = torch.arange(256, dtype=torch.float32, device=device).reshape(16, 16)
    product = (numbers @ numbers).cpu()
    plain = numbers.cpu() @ numbers.cpu()
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")),
        "capability": f"{properties.major}.{properties.minor}",
        "free_bytes": free,
        "memory_bytes": total,
        "is_right": bool(torch.allclose(product, plain, rtol=1e-2)),
        "copy_bytes_per_second": bytes_per_second_of_copies(device),
        "host_bytes_per_second": bytes_per_second_of_copies(device, torch.device("cpu")),
    }


def copy_between_all(num_gpus: int) -> dict[str, Any]:
    """Bytes per second of copies between all pairs of GPUs: an upper bound for NCCL."""
    names = [f"cuda:{index}" for index in range(num_gpus)]
    rows = [
        (first, second, bytes_per_second_of_copies(torch.device(first), torch.device(second)))
        for first, second in combinations(names, 2)
    ]
    return {"rows": rows}


ALL_BYTES = (SMALL_BYTES, *LARGE_BYTES)
FEW_GPUS = 4
"""Up to this number, each pair is measured alone; above, all are checked, and neighbours are measured."""
CPU_SECONDS, GPU_SECONDS = 20.0, 25.0
AGAIN_CPU_SECONDS, AGAIN_GPU_SECONDS = 15.0, 12.0
LOOPBACK_NAME = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Pair:
    """The devices of one all-reduce: two, the same one twice, or a single GPU."""

    devices: tuple[str, ...]
    sizes: tuple[int, ...] = ALL_BYTES

    @property
    def back_end(self) -> str:
        return "nccl" if "nccl" in backend_for(self.devices) else "gloo"

    @property
    def name(self) -> str:
        first, *rest = self.devices
        who = first if not rest else f"2 x {first}" if rest == [first] else f"{first} + {rest[0]}"
        return f"{who}, {self.back_end}"

    @property
    def is_on_cpu(self) -> bool:
        return self.devices[0] == "cpu"

    def job(self) -> Job:
        seconds = CPU_SECONDS if self.is_on_cpu else GPU_SECONDS
        return Job(add_up, (self.devices, self.sizes), len(self.devices), seconds)

    def again(self, budget: TimeBudget, settings: Settings) -> Ended:
        seconds = budget.allowed(AGAIN_CPU_SECONDS if self.is_on_cpu else AGAIN_GPU_SECONDS)
        return try_out(replace(self.job(), seconds=seconds, settings=settings))

    def remedies(self, set_names: Iterable[str]) -> list[Settings]:
        """Settings that may help if it fails."""
        return [with_interface(settings, LOOPBACK_NAME) for settings in remedies(self.back_end, set_names)]


def try_pairs(pairs: Sequence[Pair], set_names: Iterable[str], budget: TimeBudget) -> list[Trial]:
    """Try pairs at the same time; then search remedies for each pair that failed.

    `set_names` are the variables of the user's environment.
    """
    names = list(set_names)
    jobs = [pair.job() for pair in pairs]
    jobs = [replace(job, seconds=budget.allowed(job.seconds)) for job in jobs]
    if not all(job.seconds for job in jobs):
        return [Trial(pair.name, Ended(), is_left_out=True) for pair in pairs]
    first = try_together(jobs)
    return [
        Trial(pair.name, ended)
        if is_sound(ended)
        else search(Trial(pair.name, ended), pair.remedies(names), partial(pair.again, budget), budget)
        for pair, ended in zip(pairs, first, strict=True)
    ]


def schedule(num_gpus: int) -> list[list[Pair]]:
    """The pairs of this machine; those of one list are tried at the same time."""
    alone = [[Pair(("cpu", "cpu"))]]
    if num_gpus:
        alone.append([Pair(("cuda:0", "cuda:0"))])
    if num_gpus == 1:
        # No data is exchanged: it only shows that NCCL starts.
        return [*alone, [Pair(("cuda:0",), (SMALL_BYTES,))]]
    if num_gpus <= FEW_GPUS:
        return [*alone, *([_gpus(pair)] for pair in combinations(range(num_gpus), 2))]
    neighbours = [[(first, first + 1) for first in range(start, num_gpus - 1, 2)] for start in (0, 1)]
    others = [[pair for pair in one if pair[1] - pair[0] > 1] for one in rounds(num_gpus)]
    return [
        *alone,
        *([_gpus(pair) for pair in one] for one in neighbours),
        *([replace(_gpus(pair), sizes=(SMALL_BYTES,)) for pair in one] for one in others if one),
    ]


def _gpus(pair: tuple[int, int]) -> Pair:
    return Pair((f"cuda:{pair[0]}", f"cuda:{pair[1]}"))


def rounds(num: int) -> list[list[tuple[int, int]]]:
    """Every pair of `num` members once, in rounds without overlapping pairs (a round-robin tournament)."""
    players: list[int | None] = [*range(num), *([None] if num % 2 else [])]
    half = len(players) // 2
    found = []
    for _ in range(len(players) - 1):
        matches = zip(players[:half], reversed(players[half:]), strict=True)
        found.append(sorted((min(a, b), max(a, b)) for a, b in matches if a is not None and b is not None))
        # The first stays, the rest rotate.
        players = [players[0], players[-1], *players[1:-1]]
    return found
