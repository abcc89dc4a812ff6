"""N4: gradient accumulation at 1 Gbit, two hosts with two ranks each: DDP, accelerate, Lightning and evenstep.

With k micro-batches a step, all have the same k parts of the same samples on each rank, and send gradients once. Before
the race each takes a few steps, and its weights are compared with those of DDP: who has others is not in the race.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
import torch.distributed as dist
from links_hosts import on_hosts
from models import Columns, Work, mlp, pictures
from peers import Feed, Handed, Place, endless
from tests.faults.hosts import hosts
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import evenstep

MICROS = (1, 2, 4, 8)
SAMPLES = 64
"""Of a micro-batch, over all ranks."""
WORK = Work("8 layers of 512", lambda: mlp(*(512,) * 9), pictures(512, classes=512), SAMPLES, rows=4096)
OURS = "evenstep"
NUM_COMPARED, CLOSE_ENOUGH = 3, 1e-5
Racer = tuple[Callable[[int], None], nn.Module]
"""Takes steps; and what it trains."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Unlike Adam, it does not hide a gradient that is k times too large."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


class Parts(Feed):
    """This rank's part of every batch, cut into micro-batches; `k` of them are a step."""

    def __init__(self, k: int, place: Place) -> None:
        super().__init__(replace(WORK, batch=k * SAMPLES), place)
        self.k = k

    def __iter__(self) -> Iterator[Columns]:
        for x, y in super().__iter__():
            yield from zip(x.chunk(self.k), y.chunk(self.k), strict=True)


def by_torch(k: int, place: Place) -> Racer:
    model = DistributedDataParallel(WORK.model())
    optimizer, parts = sgd(model), iter(Parts(k, place))

    def run(num: int) -> None:
        for _ in range(num):
            with model.no_sync():
                for batch in islice(parts, k - 1):
                    (WORK.loss(model, batch) / k).backward()
            (WORK.loss(model, next(parts)) / k).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run, model.module


def by_accelerate(k: int, place: Place) -> Racer:
    from accelerate import Accelerator

    # All Accelerators of a process share how many micro-batches they accumulate: those of the newest.
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
    plain = WORK.model()
    model, optimizer = accelerator.prepare(plain, sgd(plain))
    parts = iter(Parts(k, place))

    def run(num: int) -> None:
        for batch in islice(parts, num * k):
            with accelerator.accumulate(model):
                accelerator.backward(WORK.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return run, plain


def by_lightning(k: int, place: Place) -> Racer:
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = WORK.model()

        def training_step(self, batch: Columns, batch_idx: int) -> Tensor:
            return WORK.loss(self.network, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.network)

    module = Module()
    made = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        strategy="ddp",
        plugins=[TorchElasticEnvironment()],
        accumulate_grad_batches=k,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    handed = Handed(Parts(k, place), lambda batches: made.fit(module, batches))
    return lambda num: handed.run(num * k), module.network


def by_evenstep(team: Any, k: int) -> Racer:
    feed = Feed(replace(WORK, batch=k * SAMPLES))
    loader = team.loader(feed.columns, batch=k * SAMPLES, accumulate=k)
    model = team.wrap(WORK.model())
    optimizer, batches = sgd(model), endless(loader)

    def run(num: int) -> None:
        for batch in islice(batches, num):
            team.backward(WORK.loss, model, batch)
            team.step(optimizer)

    return run, model.module


PEERS = {"accelerate": by_accelerate, "lightning": by_lightning}


def accumulate_all(spec: dict[str, Any]) -> dict[str, Any] | None:
    """One rank: for each number of micro-batches, everybody in turn."""
    team = evenstep.join("ddp", ["cpu", "cpu"])
    place = Place(team.world.rank, team.world.size)
    seconds: dict[str, dict[str, list[float]]] = {}
    different: dict[str, dict[str, float]] = {}
    for k in spec["micros"]:
        racers = {"torch's DDP": by_torch(k, place), OURS: by_evenstep(team, k)}
        racers |= {name: peer(k, place) for name, peer in PEERS.items() if find_spec(name) is not None}
        for run, _ in racers.values():
            run(NUM_COMPARED)
        different[str(k)] = {name: furthest(network, racers["torch's DDP"][1]) for name, (_, network) in racers.items()}
        blocks = {
            name: (lambda run=run: harness.timed(run, spec["steps"], is_together=True) / 1e3)
            for name, (run, _) in racers.items()
            if different[str(k)][name] < CLOSE_ENOUGH
        }
        seconds[str(k)] = harness.interleaved(blocks, spec["rounds"])
    return {"seconds": seconds, "different": different} if team.world.is_main else None


def furthest(network: nn.Module, reference: nn.Module) -> float:
    """The largest difference of weights, relative to the largest change that could be: on all ranks the same answer."""
    pairs = zip(network.parameters(), reference.parameters(), strict=True)
    far = torch.tensor([max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)])
    dist.all_reduce(far, op=dist.ReduceOp.MAX)
    return far.item()


def n4(is_quick: bool) -> dict[str, Any]:
    shape = {"rounds": 2, "steps": 3} if is_quick else {"rounds": 8, "steps": 6}
    with tempfile.TemporaryDirectory() as folder, hosts(2) as machines:
        for machine in machines:
            machine.cap(1000)
        found = on_hosts(machines, {"work": "accumulation", "micros": MICROS, **shape}, Path(folder))
    rows = []
    for k, figures in found["seconds"].items():
        for name, values in figures.items():
            gain = harness.compared(figures[OURS], values)
            ratio = "" if name == OURS else f"{gain.ratio:.2f} ({gain.interval})"
            rows.append([k, name, f"{1e3 * median(values):.1f}", ratio, f"{found['different'][k][name]:.0e}"])
        for name in found["different"][k].keys() - figures.keys():
            rows.append([k, name, "other gradients", "", f"{found['different'][k][name]:.0e}"])
    harness.show("", ["micro-batches", "1 Gbit", "step, ms", "evenstep is x as fast (95 %)", "weights apart"], rows)
    absent = [name for name in PEERS if find_spec(name) is None]
    if absent:
        print(f"  not installed: {', '.join(absent)} (make bench-setup)")
    return found
