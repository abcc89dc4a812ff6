"""Ranks that average through shared memory; `python shm_script.py OUT`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstep
from evenstep.distributed.shm.allreduce import Channel, open_channel
from evenstep.distributed.shm.native import build, load
from evenstep.distributed.world import World
from evenstep.strategies.ddp import Averaging, can_average

LENGTHS = (0, 1, 3, 1000, 8192, 8193, 16385, 300_007, 1_500_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def hashed(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(one.detach().view(torch.uint8).numpy().tobytes() for one in tensors)).hexdigest()


def random(length: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    draws = torch.randn(length, generator=torch.Generator().manual_seed(7 * length + rank)) * 10.0**rank
    return draws.to(dtype)


def averages(world: World, channel: Channel) -> dict[str, Any]:
    """What came of tensors of each type and length, one by one and all at once, and of gloo's sums of the same."""
    ours = {dtype: [random(length, dtype, world.rank) for length in 2 * LENGTHS] for dtype in DTYPES}
    theirs = [one.clone() for of_type in ours.values() for one in of_type]
    for of_type in ours.values():
        for one in of_type[: len(LENGTHS)]:
            channel.average([one])
        channel.average(of_type[len(LENGTHS) :])
    for one in theirs:
        dist.all_reduce(one.mul_(1 / world.size))
    flat = [one for of_type in ours.values() for one in of_type]
    apart = max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(flat, theirs, strict=True) if len(a)
    )
    return {"hash": hashed(flat), "equal": all(map(torch.equal, flat, theirs)), "apart": apart}


def interleaved(world: World, library: Any) -> list[float]:
    """Two channels by turns, many times over."""
    first, second = (open_channel(world.gather, world.rank, 5000, library) for _ in range(2))
    assert first is not None
    assert second is not None
    last = []
    for number in range(50):
        a, b = (torch.full((1250,), float(number * world.size * factor)) for factor in (1, 10))
        first.average([a])
        second.average([b])
        last = [a[-1].item(), b[0].item()]
    return last


def one_way(world: World, library: Any) -> dict[str, Any]:
    """Sums that only the first rank gets, and then copies of them; of more than the slots hold."""
    gathered, copied = (open_channel(world.gather, world.rank, 10**6, library, is_background=True) for _ in range(2))
    assert gathered is not None
    assert copied is not None
    ours = [random(length, dtype, world.rank) for dtype in DTYPES for length in LENGTHS]
    expected = []
    for one in ours:
        rows = [random(len(one), one.dtype, rank) for rank in range(world.size)]
        expected.append(sum(rows[1:], start=rows[0]))
        if not gathered.begin_sum_to_first(one):
            gathered.finish()
    has_sums = all(map(torch.equal, ours, expected))
    for one in ours:
        copied.copy_from_first(one)
    return {"has sums": has_sums, "has copies": all(map(torch.equal, ours, expected))}


class Turned(nn.Module):
    """A weight that lies in memory the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(500, 40).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def network(dtype: torch.dtype) -> nn.Module:
    """Pictures first, with weights in more orders than one, some smaller than a slot and some larger."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    layers = [nn.Flatten(), nn.Linear(32, 700), nn.Tanh(), nn.Linear(700, 40), Turned(), nn.Tanh(), nn.Linear(500, 3)]
    return nn.Sequential(convolution, *layers).to(dtype)


def trained(
    model: nn.Module, dtype: torch.dtype, rank: int, syncing: Callable[[bool], AbstractContextManager[None]]
) -> str:
    """Weights after some steps, each of two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
        for is_last in (False, True):
            with syncing(is_last):
                model(x[4 * is_last :][:4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return hashed([weight.contiguous() for weight in model.parameters()])


def by_memory(world: World, library: Any, dtype: torch.dtype) -> str:
    """What is learned where gradients are averaged after backward."""
    model = network(dtype)
    assert can_average(model)
    channel = open_channel(world.gather, world.rank, 1_000_000, library)
    assert channel is not None
    averaging = Averaging(channel, model, world)
    return trained(model, dtype, world.rank, lambda is_last: averaging if is_last else nullcontext())


def by_ddp(world: World, dtype: torch.dtype) -> str:
    """What DDP learns by itself."""
    model = DistributedDataParallel(network(dtype), gradient_as_bucket_view=True, bucket_cap_mb=0.2)
    return trained(model, dtype, world.rank, lambda is_last: nullcontext() if is_last else model.no_sync())


def two_models(team: Any) -> str:
    """A generator and a discriminator, each with its own way through memory, by turns."""
    torch.manual_seed(1)
    one, other = team.wrap(nn.Linear(4, 4)), team.wrap(nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    loader = team.loader((torch.randn(60, 4, generator=torch.Generator().manual_seed(2)),), batch=6)
    for batch in loader:
        team.backward(lambda models, batch: models[0](models[1](batch[0])).square().mean(), (other, one), batch)
        team.step(optimizers[1])
        team.backward(lambda models, batch: models[1](models[0](batch[0])).mean(), (one, other), batch)
        team.step(optimizers[0])
    return hashed([*one.parameters(), *other.parameters()])


def left_to_ddp(team: Any) -> dict[str, bool]:
    """Which models have gradients that no channel averages."""
    gaps = nn.Linear(4, 2)
    gaps.weight = nn.Parameter(torch.randn(2, 8)[:, ::2])
    models = {
        "fp32": nn.Linear(4, 2),
        "fp16": nn.Linear(4, 2).half(),
        "sparse": nn.Embedding(4, 2, sparse=True),
        "gaps": gaps,
    }
    return {name: isinstance(team.wrap(one).replicas[0], DistributedDataParallel) for name, one in models.items()}


def left_behind() -> dict[str, Any]:
    """What others could see of us: files that are open, and names in /dev/shm."""
    links = [
        os.readlink(f"/proc/self/fd/{number}")
        for number in os.listdir("/proc/self/fd")
        if number.isdigit() and os.path.lexists(f"/proc/self/fd/{number}")
    ]
    return {"memfds": [link for link in links if "memfd:evenstep" in link], "files": len(links)}


def main(out: Path) -> None:
    team = evenstep.join("ddp")
    world = team.world
    built = build(out.parent) if world.is_main else None
    world.barrier()
    found: dict[str, Any] = {"built": built is not None, "mailbox": world.communication.scalars is not None}
    library = load(out.parent)
    channel = open_channel(world.gather, world.rank, 4_000_000, library)
    found["opened"] = channel is not None
    if channel is not None:
        found["shared"] = {
            **averages(world, channel),
            "interleaved": interleaved(world, library),
            "one way": one_way(world, library),
            "learned": {str(dtype): by_memory(world, library, dtype) for dtype in DTYPES},
        }
    found["without the library"] = open_channel(world.gather, world.rank, 4_000_000, None) is not None
    found["gloo"] = {str(dtype): by_ddp(world, dtype) for dtype in DTYPES}
    found["left to DDP"] = left_to_ddp(team)
    found["two models"] = two_models(team)
    found["left"] = left_behind()
    every = world.gather(found)
    if world.is_main:
        out.write_text(json.dumps(every))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
