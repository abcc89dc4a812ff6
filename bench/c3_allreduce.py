"""C3: averaging a tensor over two ranks of one machine: gloo, shared memory by C, shared memory by torch alone.

python bench/c3_allreduce.py [--quick] [--out FILE]

One thread each. All ways live in the same two processes and take their blocks in turn; a block takes as long as the
slower rank. The limit copies and adds as many bytes in one's own memory, chunk by chunk, and waits for nobody. Results
are compared bit for bit first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Entry, Race, Result

from evenstep.distributed.shm.allreduce import Channel, open_channel
from evenstep.distributed.shm.native import load
from evenstep.distributed.world import World, join_world

SIZES = {2**12: "4 KB", 2**16: "64 KB", 2**20: "1 MB", 2**22: "4 MB", 2**24: "16 MB", 100 * 2**20: "100 MB"}
QUICK = (2**16, 2**22)
GOALS = {2**12: 1.0, 2**16: 2.0}
LARGE_GOAL = 3.0
OURS, GLOO, AGAIN, LIMIT = "evenstep, C", "gloo", "gloo, again", "copy and add"
BLOCK_BYTES = 2**26
MOST_CALLS = 200
CHUNK = 2**16
"""Numbers that the limit copies and adds at once, which stay in the cache."""

Configuration = Callable[[torch.Tensor], None]


def by_gloo(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor.mul_(0.5))


def through(channel: Channel) -> Configuration:
    def average(tensor: torch.Tensor) -> None:
        channel.average([tensor])

    return average


def alone(tensor: torch.Tensor) -> None:
    """The least that has to be done: half is copied out, half is added, half is copied in."""
    slot = torch.empty(min(CHUNK, tensor.numel()))
    for chunk in tensor.split(CHUNK):
        half = chunk[: -(-len(chunk) // 2)]
        torch.mul(half, 0.5, out=slot[: len(half)])
        half.add_(slot[: len(half)])


def configs(world: World, num_bytes: int) -> dict[str, Configuration]:
    """Everything that can do it here."""
    found: dict[str, Configuration] = {GLOO: by_gloo, AGAIN: by_gloo}
    channel = open_channel(world.gather, world.rank, num_bytes, load())
    if channel is not None:
        found[OURS] = through(channel)
    return {**found, LIMIT: alone}


def timed(config: Configuration, tensor: torch.Tensor) -> float:
    """Milliseconds of one call, by this rank's clock; all begin together."""
    calls = max(2, min(MOST_CALLS, BLOCK_BYTES // tensor.nbytes))
    config(tensor)
    dist.barrier()
    tensor.fill_(1.0)
    began = time.perf_counter()
    for _ in range(calls):
        config(tensor)
    return (time.perf_counter() - began) / calls * 1e3


def on_rank(sizes: tuple[int, ...], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Called in every rank: the figures of every way, for each size."""
    torch.set_num_threads(1)
    world = join_world(("cpu", "cpu"), needs_group=True)
    figures = {}
    for num_bytes in sizes:
        given = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(world.rank))
        racing = configs(world, num_bytes)
        expected = given.clone()
        by_gloo(expected)
        for name, config in racing.items():
            result = given.clone()
            config(result)
            if config is not alone and not torch.equal(result, expected):
                raise SystemExit(f"{name} differs from gloo at {num_bytes} bytes; no race")
        blocks = {name: partial(timed, config, given) for name, config in racing.items()}
        figures[num_bytes] = harness.interleaved(blocks, rounds)
    return figures


def race(size: int, figures: dict[str, list[float]]) -> Race:
    """The table of one size."""
    goal = GOALS.get(size, LARGE_GOAL)
    entries = {
        OURS: Entry("ours"),
        GLOO: Entry("peer", goal=goal),
        AGAIN: Entry("control", against=GLOO),
        LIMIT: Entry("limit"),
    }
    missing = {name: "could not be opened here" for name in (OURS,) if name not in figures}
    return harness.judge(f"{SIZES[size]}, 2 ranks", "ms", entries, figures, absent=missing)


def measure(quick: bool) -> Result:
    sizes, rounds = (QUICK, 5) if quick else (tuple(SIZES), 15)
    ranks: list[Any] = harness.on_ranks(on_rank, sizes, rounds)
    races = {size: race(size, harness.slowest([rank[size] for rank in ranks])) for size in sizes}
    headline = {
        f"ours_over_{key}_{SIZES[size].replace(' ', '')}": harness.ours_over(one, name)
        for size, one in races.items()
        for key, name in {"gloo": GLOO, "copy_and_add": LIMIT}.items()
    }
    goal = "2 x gloo at 64 KB, 3 x from 1 MB, and the same sum, bit for bit"
    return Result("C3", "an all-reduce of two ranks on one machine", goal, list(races.values()), headline=headline)


def main() -> None:
    given = harness.parser(__doc__).parse_args()
    harness.finish(measure(given.quick), given.out)


if __name__ == "__main__":
    main()
