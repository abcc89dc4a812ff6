"""Ranks that average through shared memory, in every way; `python share_together.py OUT`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstep
from evenstep.worker.comm.channel import Channel, open_channel
from evenstep.worker.comm.hook import Buckets
from evenstep.worker.comm.library import build, load
from evenstep.worker.world import World

LENGTHS = (0, 1, 3, 1000, 8192, 8193, 16385, 300_007, 1_500_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def hashed(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(one.detach().view(torch.uint8).numpy().tobytes() for one in tensors)).hexdigest()


def random(length: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    draws = torch.randn(length, generator=torch.Generator().manual_seed(7 * length + rank)) * 10.0**rank
    return draws.to(dtype)


def averages(world: World, channel: Channel) -> dict[str, Any]:
    """What came of tensors of each type and length, several under way at once, and of gloo's sums of the same."""
    ours = [random(length, dtype, world.rank) for dtype in DTYPES for length in LENGTHS]
    theirs = [one.clone() for one in ours]
    for one in ours:
        channel.post(one)
    channel.finish()
    for one in theirs:
        dist.all_reduce(one.mul_(1 / world.size))
    apart = max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(ours, theirs, strict=True) if len(a)
    )
    return {"hash": hashed(ours), "equal": all(map(torch.equal, ours, theirs)), "apart": apart}


def interleaved(world: World, library: Any) -> list[float]:
    """Two channels at once, finished in the other order, many times over."""
    first, second = (open_channel(world.gather, world.rank, 5000, library) for _ in range(2))
    assert first is not None
    assert second is not None
    last = []
    for number in range(50):
        a, b = (torch.full((1250,), float(number * world.size * factor)) for factor in (1, 10))
        first.post(a)
        second.post(b)
        second.finish()
        first.finish()
        last = [a[-1].item(), b[0].item()]
    return last


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 700), nn.Tanh(), nn.Linear(700, 500), nn.Tanh(), nn.Linear(500, 3)).to(dtype)


def trained(wrap: Callable[[nn.Module], nn.Module], dtype: torch.dtype, rank: int) -> list[torch.Tensor]:
    """Weights after some steps, each of two micro-batches."""
    model = wrap(network(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
        with model.no_sync():
            model(x[:4]).square().mean().backward()
        model(x[4:]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def buckets(world: World, library: Any, is_gloo: bool, dtype: torch.dtype) -> str:
    """How DDP with several buckets ends, by its own sending or by ours."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.2)
        if not is_gloo:
            channel = open_channel(world.gather, world.rank, 1_000_000, library)
            assert channel is not None
            wrapped.register_comm_hook(Buckets(channel, world.tap), lambda state, bucket: state.take(bucket))
        return wrapped

    return hashed(trained(wrap, dtype, world.rank))


def two_models(team: Any) -> str:
    """A generator and a discriminator, each with its own way through memory, by turns."""
    torch.manual_seed(1)
    one, other = team.spread(nn.Linear(4, 4)), team.spread(nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    loader = team.loader((torch.randn(60, 4, generator=torch.Generator().manual_seed(2)),), batch=6)
    for batch in loader:
        team.backward(lambda models, batch: models[0](models[1](batch[0])).square().mean(), (other, one), batch)
        team.step(optimizers[1])
        team.backward(lambda models, batch: models[1](models[0](batch[0])).mean(), (one, other), batch)
        team.step(optimizers[0])
    return hashed([*one.parameters(), *other.parameters()])


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
    found: dict[str, Any] = {"built": built is not None, "mailbox": world.nearby.mailbox is not None}
    for name, library in {"c": load(out.parent), "torch": None}.items():
        channel = open_channel(world.gather, world.rank, 4_000_000, library)
        assert channel is not None
        found[name] = {
            "kind": type(channel).__name__,
            **averages(world, channel),
            "interleaved": interleaved(world, library),
            "ddp": {str(dtype): buckets(world, library, False, dtype) for dtype in (*DTYPES, torch.float16)},
        }
    found["gloo"] = {str(dtype): buckets(world, None, True, dtype) for dtype in (*DTYPES, torch.float16)}
    found["two models"] = two_models(team)
    found["left"] = left_behind()
    every = world.gather(found)
    if world.is_main:
        out.write_text(json.dumps(every))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
