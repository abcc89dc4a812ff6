"""C3: averaging a tensor over two ranks of one machine: gloo, shared memory by C, shared memory by torch alone.

python bench/allreduce.py [--quick] [--out FILE]

One thread each. All ways live in the same two processes and take their blocks in turn; a block takes as long as the
slower rank. The limit copies and adds as many bytes in one's own memory, piece by piece, and waits for nobody. Results
are compared bit for bit first. "gloo again" is gloo against itself: no claim smaller than its spread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from harness import compared, interleaved, show, write

from evenstep.launcher.script import launch
from evenstep.worker.comm.channel import Channel, open_channel
from evenstep.worker.comm.library import load
from evenstep.worker.world import World, join_world

SIZES = (2**12, 2**16, 2**20, 2**22, 2**24, 100 * 2**20)
GOALS = {2**12: 1.0, 2**16: 2.0}
LARGE_GOAL = 3.0
GLOO, OURS = "gloo", "shared memory, C"
BLOCK_BYTES = 2**26
MOST_CALLS = 200
PIECE = 2**16
"""Numbers that the limit copies and adds at once, which stay in the cache."""

Way = Callable[[torch.Tensor], None]


def by_gloo(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor.mul_(0.5))


def through(channel: Channel) -> Way:
    def average(tensor: torch.Tensor) -> None:
        channel.post(tensor)
        channel.finish()

    return average


def alone(tensor: torch.Tensor) -> None:
    """The least that has to be done: half is copied out, half is added, half is copied in."""
    slot = torch.empty(min(PIECE, tensor.numel()))
    for piece in tensor.split(PIECE):
        half = piece[: -(-len(piece) // 2)]
        torch.mul(half, 0.5, out=slot[: len(half)])
        half.add_(slot[: len(half)])


def ways(world: World, num_bytes: int) -> dict[str, Way]:
    """Everything that can do it here."""
    found: dict[str, Way] = {GLOO: by_gloo, "gloo again": by_gloo}
    for name, library in {OURS: load(), "shared memory, torch": None}.items():
        channel = open_channel(world.gather, world.rank, num_bytes, library)
        if channel is not None and (library is not None or name != OURS):
            found[name] = through(channel)
    return {**found, "limit: copy and add": alone}


def timed(way: Way, tensor: torch.Tensor) -> float:
    """Milliseconds of one call, by this rank's clock; all begin together."""
    calls = max(2, min(MOST_CALLS, BLOCK_BYTES // tensor.nbytes))
    way(tensor)
    dist.barrier()
    tensor.fill_(1.0)
    began = time.perf_counter()
    for _ in range(calls):
        way(tensor)
    return (time.perf_counter() - began) / calls * 1e3


def on_rank(sizes: tuple[int, ...], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Called in every rank: the figures of every way, for each size."""
    torch.set_num_threads(1)
    world = join_world(("cpu", "cpu"), needs_group=True)
    figures = {}
    for num_bytes in sizes:
        given = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(world.rank))
        racing = ways(world, num_bytes)
        expected = given.clone()
        by_gloo(expected)
        for name, way in racing.items():
            result = given.clone()
            way(result)
            if way is not alone and not torch.equal(result, expected):
                raise SystemExit(f"{name} differs from gloo at {num_bytes} bytes; no race")
        blocks = {name: partial(timed, way, given) for name, way in racing.items()}
        figures[num_bytes] = interleaved(blocks, rounds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    sizes, rounds = (SIZES[:4], 5) if given.quick else (SIZES, 15)
    ranks: list[Any] = launch(on_rank, sizes, rounds, devices=2)
    rows, results = [], {}
    for size in sizes:
        slowest = {name: list(map(max, *(rank[size][name] for rank in ranks))) for name in ranks[0][size]}
        goal = GOALS.get(size, LARGE_GOAL)
        for name, figures in slowest.items():
            ratio = compared(figures, slowest[GLOO])
            results[f"{size} bytes, {name}"] = {**ratio.figures("ms"), **({"goal": goal} if name == OURS else {})}
            met = f"{goal:g} x: {'met' if ratio.low >= goal else 'not met'}" if name == OURS else ""
            rows.append([f"{size:,}", name, f"{ratio.first:.3f}", f"{ratio.ratio:.2f}", ratio.interval, met])
    show("An average over 2 ranks, 1 thread each", ["bytes", "by", "ms", "gloo / this", "95 %", "goal"], rows)
    if given.out:
        write(given.out, "python bench/allreduce.py", results)


if __name__ == "__main__":
    main()
