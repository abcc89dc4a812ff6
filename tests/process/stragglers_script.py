"""Three ranks look at each other: at their paces, and at their replicas; `python stragglers_script.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evenstep.distributed.worker_process import WorkerSpec, set_spec
from evenstep.distributed.world import World, join_world
from evenstep.errors import TrainingError
from evenstep.monitor.replica_check import ReplicaCheck
from evenstep.monitor.stragglers import StragglerMonitor, probe

NUM_RANKS = 3
STEPS = 8
SLOW_SECONDS = 0.04
Seconds = Callable[[int], float]


def nothing(step: int) -> float:
    return 0.0


def take_steps(
    pace: StragglerMonitor, read: Seconds = nothing, compute: Seconds = nothing, after: Seconds = nothing
) -> None:
    """Steps with a real collective, each part taking as long as it is told to."""
    gradients = torch.ones(1000)
    for step in range(STEPS):
        started = time.perf_counter()
        time.sleep(read(step))
        has_batch = time.perf_counter()
        time.sleep(0.002 + compute(step))
        arrived = time.perf_counter()
        dist.all_reduce(gradients)
        time.sleep(after(step))
        pace.add(has_batch - started, arrived - has_batch, time.perf_counter() - arrived)


def paces(world: World) -> dict[str, Any]:
    """What this rank was told of the paces, in each case."""

    def only(rank: int, seconds: float) -> Seconds:
        return lambda step: seconds if world.rank == rank else 0.0

    said: dict[str, Any] = {}
    pace = StragglerMonitor(world)
    take_steps(pace)
    said["clean"] = pace.judge()
    take_steps(pace, compute=only(1, SLOW_SECONDS))
    said["slow compute"] = pace.judge()
    take_steps(pace, compute=only(1, SLOW_SECONDS))
    said["the same again"] = pace.judge()
    take_steps(pace, compute=only(1, 2.5 * SLOW_SECONDS))
    said["much worse"] = pace.judge()
    take_steps(pace, read=only(0, SLOW_SECONDS))
    said["slow input"] = pace.judge()
    take_steps(pace, compute=lambda step: 0.3 if world.rank == 2 and step == 3 else 0.0)
    said["one long step"] = pace.judge()
    pace.add(0.0, 1.0 if world.rank == 0 else 0.0, 0.0)
    said["too few steps"] = pace.judge()
    pace = StragglerMonitor(world)
    take_steps(pace, after=lambda step: 0.025)
    said["fast links"] = pace.judge()
    said["rates"] = probe(world)
    return said


class Codebook(nn.Module):
    """A buffer that follows the samples of its rank, as running statistics of a user's own layer do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("fixed", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().mean(0)
        return x * self.fixed[0]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Codebook(), nn.Linear(4, 3))


class Training:
    """Steps as ddp takes them, looked at after each; what a user may do wrong comes between.

    By hand: DistributedDataParallel imports torch's compiler first, three seconds on every rank.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.module = model()
        self.check = ReplicaCheck(world, self.module)
        self.step = 0

    def take(self, averages: bool = True) -> str | None:
        """One step; what the check says after it."""
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * self.step + self.world.rank))
        self.module(data).square().mean().backward()
        with torch.no_grad():
            for weight in self.module.parameters():
                assert weight.grad is not None
                if averages:
                    dist.all_reduce(weight.grad)
                weight -= 0.03 * weight.grad
                weight.grad = None
        self.step += 1
        return self.look()

    def look(self) -> str | None:
        try:
            self.check.compare(self.step)
        except TrainingError as error:
            return str(error)
        return None


def replicas(world: World) -> dict[str, Any]:
    """What this rank was told of the replicas, in each case."""
    said: dict[str, Any] = {}
    training = Training(world)
    said["right"] = [training.take() for _ in range(3)]
    said["around the wrapper"] = training.take(averages=False)
    training = Training(world)
    said["right again"] = training.take()
    last = training.module[3].bias
    if world.rank == 2:
        with torch.no_grad():
            last[1] = torch.nextafter(last[1], torch.tensor(9.0))
    said["one bit on rank 2"] = training.look()
    return said


def work(rank: int, folder: Path) -> None:
    """One rank's whole life."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    set_spec(WorkerSpec(store=str(folder / "store")))
    torch.set_num_threads(1)
    world = join_world(("cpu",) * NUM_RANKS, needs_group=True)
    reports = world.gather({**paces(world), **replicas(world)})
    if world.is_main:
        (folder / "out.json").write_text(json.dumps(reports))
    world.barrier()


if __name__ == "__main__":
    # Forked: torch is imported once for all of them.
    ranks = [get_context("fork").Process(target=work, args=(rank, Path(sys.argv[1]))) for rank in range(NUM_RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(any(one.exitcode for one in ranks))
