"""Who takes the steps of a GPU benchmark: loops written by hand, accelerate, Fabric, Lightning, evenstep.

A racer is made once, takes steps when told to, and can be asked for its loss on a fixed batch. None but evenstep reads
the loss of a step: evenstep's own loop does, so its step has that in it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_works import Data, Feed, Learner, Work, loss
from torch import Tensor, nn

import evenstep
from evenstep.plan import Plan
from evenstep.task import Task
from evenstep.training.loop import train
from evenstep.training.trainer import Trainer

GRAPH_WARM_UP = 3
LIGHTNING_WARM_UP = 10
ENDLESS = 10**9


@dataclass
class Racer:
    """Takes steps when told to."""

    advance: Callable[[int], None]
    probe: Callable[[], float]
    seconds_of: Callable[[int], float] | None = None
    """Takes so many steps by a clock of its own; for a framework that cannot be left in the middle."""
    close: Callable[[], None] = lambda: None
    messages: list[str] = dataclasses.field(default_factory=list)
    """What it said of how it takes its steps."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def raw(
    work: Work,
    wrap: Callable[[nn.Module], Callable[..., Tensor]] = lambda learner: learner,
    fused: bool | None = True,
    reduce_overhead: bool = False,
) -> Racer:
    """The loop that people write by hand."""
    learner = Learner(work.network()).to(work.device)
    called = wrap(learner)
    # After wrapping: fully_shard puts other parameters in.
    optimizer = work.adamw(learner.parameters(), fused)
    feed = Feed(work)

    def advance(num: int) -> None:
        for _ in range(num):
            if reduce_overhead:
                torch.compiler.cudagraph_mark_step_begin()
            with work.autocast():
                value = called(*feed.next())
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Racer(advance, lambda: work.probe(learner.network))


def compiled(work: Work, mode: str | None = None) -> Racer:
    """The same, with the network and its loss compiled."""
    return raw(work, lambda learner: torch.compile(learner, mode=mode), reduce_overhead=mode == "reduce-overhead")


def wake_compiler(device: torch.device) -> None:
    """Import what compiles and start its processes, which is nobody's compile time."""
    torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))


def data_parallel(work: Work, loss_inside: bool) -> Racer:
    """nn.DataParallel over the first card twice; as in its tutorial the loss is computed on the gathered outputs."""

    def wrap(learner: nn.Module) -> Callable[..., Tensor]:
        if loss_inside:
            wrapped = nn.DataParallel(learner, device_ids=[0, 0])
            return lambda *batch: wrapped(*batch).mean()
        network = nn.DataParallel(learner.network, device_ids=[0, 0])  # type: ignore[arg-type]
        return lambda *batch: loss(network, batch)

    return raw(work, wrap)


def distributed(work: Work) -> Racer:
    """torch's DistributedDataParallel; the process group must be there."""
    from torch.nn.parallel import DistributedDataParallel

    ids = [work.device.index] if work.device.type == "cuda" else None
    return raw(work, lambda learner: DistributedDataParallel(learner, device_ids=ids, gradient_as_bucket_view=True))


def fully_sharded(work: Work) -> Racer:
    """torch's `fully_shard`, cut into the same units as evenstep's; the process group must be there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from evenstep.strategies.fsdp import units

    learners = []

    def wrap(learner: nn.Module) -> nn.Module:
        mesh = init_device_mesh(work.device.type, (1,))
        for unit in units(learner):
            fully_shard(unit, mesh=mesh)
        fully_shard(learner, mesh=mesh)
        learners.append(learner)
        return learner

    racer = raw(work, wrap)
    racer.probe = lambda: _probed_by(work, learners[0])
    return racer


@torch.no_grad()
def _probed_by(work: Work, learner: nn.Module) -> float:
    with work.autocast():
        return learner(*(column[: work.batch] for column in work.data)).item()


def graph(work: Work, with_input: bool, compile_: bool = False) -> Racer:
    """The step captured by hand as one CUDA graph; `with_input` copies each batch in, otherwise one comes again."""
    learner = Learner(work.network()).to(work.device)
    called = torch.compile(learner) if compile_ else learner
    optimizer = work.adamw(learner.parameters(), capturable=True)
    feed = Feed(work)
    static = feed.next()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with work.autocast():
            value = called(*static)
        value.backward()
        optimizer.step()

    def take() -> None:
        ids = feed.ids()
        for column, target in zip(work.data, static, strict=True):
            torch.index_select(column, 0, ids, out=target)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(GRAPH_WARM_UP):
            if number:
                take()
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    # Before: gradients must come from the graph's own memory.
    optimizer.zero_grad(set_to_none=True)
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(captured):
        step()

    # The graph reads and writes these, and keeps none of them alive.
    kept = [learner, optimizer, static]

    def advance(num: int) -> None:
        for _ in range(num):
            if with_input:
                take()
            captured.replay()

    def close() -> None:
        captured.reset()
        kept.clear()

    return Racer(advance, lambda: work.probe(learner.network), close=close)


def accelerated(work: Work, compile_: bool = False) -> Racer:
    """accelerate's five lines."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(
        mixed_precision="bf16" if work.precision == "bf16" else "no",
        cpu=work.device.type == "cpu",
        dynamo_backend="inductor" if compile_ else None,
    )
    learner = Learner(work.network()).to(work.device)
    model, optimizer = accelerator.prepare(learner, work.adamw(learner.parameters()))
    feed = Feed(work)

    def advance(num: int) -> None:
        for _ in range(num):
            value = model(*feed.next())
            accelerator.backward(value)
            optimizer.step()
            optimizer.zero_grad()

    def close() -> None:
        accelerator.free_memory()
        AcceleratorState._reset_state(True)

    return Racer(advance, lambda: work.probe(learner.network), close=close)


def _lightning_device(work: Work) -> dict[str, Any]:
    precision = "bf16-mixed" if work.precision == "bf16" else "32-true"
    return {"accelerator": work.device.type, "devices": 1, "precision": precision}


def fabric(work: Work) -> Racer:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    strings = Fabric(**_lightning_device(work))
    learner = Learner(work.network()).to(work.device)
    model, optimizer = strings.setup(learner, work.adamw(learner.parameters()))
    feed = Feed(work)

    def advance(num: int) -> None:
        for _ in range(num):
            value = model(*feed.next())
            strings.backward(value)
            optimizer.step()
            optimizer.zero_grad()

    return Racer(advance, lambda: work.probe(learner.network))


def lightning(work: Work) -> Racer:
    """Lightning's Trainer: a new one for every block, whose first steps are off the clock."""
    import lightning as pl

    learner = Learner(work.network()).to(work.device)
    optimizer = work.adamw(learner.parameters())
    feed = Feed(work)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.learner = learner

        def training_step(self, batch: Data, _index: int) -> Tensor:
            value: Tensor = self.learner(*batch)
            return value

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    class Clock(pl.Callback):
        began = 0.0

        def on_train_batch_end(self, _trainer: Any, _module: Any, _out: Any, _batch: Any, index: int) -> None:
            if index + 1 == LIGHTNING_WARM_UP:
                synchronize(work.device)
                self.began = time.perf_counter()

        def on_train_epoch_end(self, *_: Any) -> None:
            synchronize(work.device)
            self.ended = time.perf_counter()

    class Fed:
        def __init__(self, num: int) -> None:
            self._num = num

        def __len__(self) -> int:
            return self._num

        def __iter__(self) -> Iterator[Data]:
            return (feed.next() for _ in range(self._num))

    module = Module()

    def fit(num: int) -> Clock:
        clock = Clock()
        trainer = pl.Trainer(
            **_lightning_device(work),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock],
        )
        # At its end it frees the workspaces of cuBLAS, under the graphs of the other racers.
        with patch.object(torch._C, "_cuda_clearCublasWorkspaces", lambda: None):
            trainer.fit(module, Fed(num))
        return clock

    def seconds_of(num: int) -> float:
        clock = fit(num + LIGHTNING_WARM_UP)
        return clock.ended - clock.began

    def advance(num: int) -> None:
        fit(num)

    # The Trainer leaves the network on the CPU.
    return Racer(advance, lambda: work.probe(learner.network.to(work.device)), seconds_of)


def ours(work: Work, strategy: str = "single", num_devices: int = 1, compile_: bool = False, **choices: Any) -> Racer:
    """evenstep's own Trainer and loop, in this process; `choices` are fields of its plan."""
    devices = (str(work.device),) * num_devices
    plan = Plan(
        batch=work.batch,
        strategy=strategy,  # type: ignore[arg-type]
        devices=devices,
        steps=ENDLESS,
        precision=work.precision,
        compile=compile_,
        **choices,
    )
    task = Task(model=work.network, train=work.data, loss=loss, optimizer=work.adamw)
    team = evenstep.join(strategy, devices, work.precision, virtual_replicas=plan.virtual_replicas)
    folder = tempfile.TemporaryDirectory()
    job = Trainer(plan, task, Path(folder.name), team)
    steps = train(
        # What was learned is compared after so many steps, not while the GPU is two steps behind the host.
        job.run,
        job.stepper,
        job.plan,
        job._peak_bytes,
        waits_at=lambda step: step == work.check_steps,
    )

    def advance(num: int) -> None:
        for _ in islice(steps, num):
            pass

    def probe() -> float:
        if strategy != "fsdp":
            return work.probe(job._model.module)
        # Sharded weights are whole inside the root's forward alone.
        with torch.no_grad(), work.autocast():
            batch = tuple(column[: work.batch] for column in work.data)
            return job._model.replicas[0](loss, batch).item()

    def close() -> None:
        steps.close()  # type: ignore[attr-defined]
        job.close()
        folder.cleanup()

    return Racer(advance, probe, close=close, messages=job.stepper.messages)
