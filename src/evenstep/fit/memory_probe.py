"""What real steps take: a few of them, in processes that do nothing else, so that one may run out of memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from evenstep.data.adapt import adapt_train, validation_sets
from evenstep.data.iterable import Stream
from evenstep.data.loader import Loader
from evenstep.distributed.worker_process import read_rank
from evenstep.errors import Preempted
from evenstep.fit.device_memory import MemoryMeter, available_bytes, limit_gpus, warm_up
from evenstep.fit.fake_tensor_pass import longest
from evenstep.monitor.known_errors import Situation, is_out_of_memory
from evenstep.plan import Plan
from evenstep.sampling.rng import fork_rng
from evenstep.sampling.samplers import Subset
from evenstep.strategy_facts import STRATEGIES
from evenstep.task import Task
from evenstep.training.loop import train
from evenstep.training.step import Stepper, eager_steps
from evenstep.training.team import Team, join_team
from evenstep.training.trainer import Event, Trainer, perform, set_up_torch

FILE, PROCESS_FILE = "memory.json", "process.json"
OUT_OF_MEMORY, AVAILABLE = "out-of-memory-", "available-"
"""Files of each rank in the folder of a probe: it had too little memory; what it had at its start."""
STEPS = 5
"""The optimizer's state is made in the first; the others are timed."""


@dataclass(frozen=True, kw_only=True)
class ProbedMemory:
    """What steps took, on the rank that took most."""

    peak_bytes: int
    """On a GPU, of tensors; on the CPU, of the whole process."""
    growth_bytes: int
    """The same, without what the process held before it made the model."""
    reserved_bytes: int
    """What the allocator of a GPU took for it; on the CPU, as `peak_bytes`."""
    evaluation_bytes: int
    """The peak of evaluating one batch; 0 without data for it."""
    available_bytes: int
    """What a process had at its start, on the rank that had least."""
    step_seconds: float
    """Of the slowest rank."""


def warm_up_shards(team: Team) -> None:
    """Gather and reduce a little: what torch loads for it is no part of what a model takes."""
    with fork_rng():
        model = team.wrap(nn.Linear(8, 8))
    # Every rank and every virtual replica has some.
    num = 8 * (team.world.num_virtual or team.world.size)
    for batch in team.loader((torch.zeros(num, 8),), batch=num):
        team.backward(lambda model, data: model(data[0]).mean(), model, batch)


def warm_up_parts(team: Team) -> None:
    """The same for a model that ranks divide: a few layers, and messages between ranks."""
    num = 2 * team.world.ranks_per_replica
    with fork_rng():
        layers = [layer for _ in range(num) for layer in (nn.Linear(8 * num, 8 * num), nn.ReLU())]
        data = torch.zeros(team.world.size, 8 * num)
        model = team.wrap(nn.Sequential(*layers), lambda model: model(data))
    for batch in team.loader((data,), batch=len(data)):
        team.backward(lambda model, rows: model(rows[0]).mean(), model, batch)


def load_libraries(plan: Plan, team: Team) -> None:
    """On a CPU, take the memory that torch takes for a strategy, whatever the model."""
    warm_up()
    facts = STRATEGIES[plan.strategy]
    if facts.model_axis is not None and team.world.ranks_per_replica > 1:
        warm_up_parts(team)
    elif facts.shards:
        warm_up_shards(team)


@dataclass(frozen=True)
class ProcessMemory:
    """What processes of a strategy hold and have left before they make a model."""

    held_bytes: int
    """On the rank that holds most."""
    available_bytes: int
    """What a process could use in total, on the rank that has least."""


def measure_process(plan: Plan, task: Task, run_folder: Path) -> Iterator[Event]:
    """What a worker does to see what a process of a strategy holds before it has a model."""
    set_up_torch(plan)
    team = join_team(
        *(plan.strategy, plan.devices, plan.precision, plan.seed),
        needs_group=False,
        mesh=plan.mesh,
        schedule=plan.pipeline_schedule,
    )
    device, num_ranks = team.world.device, team.world.size
    # As in a probe: what libraries take of a limit is not there for a model.
    available = available_bytes(device, num_ranks)
    load_libraries(plan, team)
    ranks = team.world.gather([MemoryMeter(device).now(), available])
    if team.world.is_main:
        found = ProcessMemory(max(held for held, _ in ranks), min(available for _, available in ranks))
        (run_folder / PROCESS_FILE).write_text(json.dumps(asdict(found)))
    # No rank exits while another still reads what it sent.
    team.world.barrier()
    yield from ()


class MemoryProbe(Trainer):
    """A few steps and an evaluation of one batch, measured; nothing is saved."""

    def __init__(self, plan: Plan, task: Task, run_folder: Path, team: Team) -> None:
        world = team.world
        devices = dict.fromkeys(world.devices) if world.device.type == "cuda" else world.devices[:1]
        self.meters = [MemoryMeter(device) for device in devices]
        num_sharing = world.size if world.device.type == "cpu" else plan.devices.count(str(world.device))
        self.available = min(available_bytes(device, num_sharing) for device in devices)
        # Read also where a rank runs out of memory: the next probe is to fit on all.
        (run_folder / f"{AVAILABLE}{world.rank}").write_text(str(self.available))
        if world.device.type == "cpu":
            load_libraries(plan, team)
        for meter in self.meters:
            meter.reset()
        self.before = [meter.now() for meter in self.meters]
        super().__init__(plan, task, run_folder, team)
        self.valid = dict(islice(self._short_valid(), 1))

    def _short_valid(self) -> Iterator[tuple[str, Loader]]:
        """The first batch of each validation set that has a length."""
        for name, data in validation_sets(self.task.valid).items():
            num = self.valid[name].num_samples
            if num is not None:
                first = Subset(np.arange(min(num, self.plan.batch)), shuffle=False)
                yield name, self._loader(data, shuffle=False, sampler=first, what="valid")

    def _stepper(self) -> Stepper:
        # A CUDA graph is captured only where memory is left for it.
        return eager_steps(self._recipe()) if "" in self.run.models else super()._stepper()

    def situation(self, error: BaseException) -> Situation | None:
        return None

    def events(self) -> Iterator[Event]:
        seconds: list[float] = []
        began = time.perf_counter()
        for step, *_ in train(self.run, self.stepper, self.plan, self._peak_bytes, waits_at=lambda step: True):
            yield step
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
            if self.team.requests.stop:
                raise Preempted("stopped")
        peaks = [meter.peak() for meter in self.meters]
        reserved = [meter.reserved() for meter in self.meters]
        evaluated = self._evaluation_peak()
        own = ProbedMemory(
            peak_bytes=max(peaks),
            growth_bytes=max(peak - before for peak, before in zip(peaks, self.before, strict=True)),
            reserved_bytes=max(reserved),
            evaluation_bytes=evaluated,
            available_bytes=self.available,
            step_seconds=median(seconds[1:] or seconds),
        )
        ranks = self.team.world.gather(asdict(own))
        if self.team.world.is_main:
            highest = {name: max(one[name] for one in ranks) for name in ranks[0]}
            highest["available_bytes"] = min(one["available_bytes"] for one in ranks)
            (self.folder / FILE).write_text(json.dumps(highest))

    def _evaluation_peak(self) -> int:
        if not self.valid:
            return 0
        for meter in self.meters:
            meter.reset()
        self._evaluate(0, can_stop=False)
        return max(meter.peak() for meter in self.meters)


def probe_memory(plan: Plan, task: Task, run_folder: Path, *, limit: int | None = None) -> Iterator[Event]:
    """What a worker does to see what a plan takes: `plan.steps` steps, in at most `limit` bytes of a GPU."""
    try:
        if limit is not None:
            limit_gpus(plan.devices, limit)
        yield from perform(plan, longest_first(plan, task), run_folder, make=MemoryProbe)
    except Exception as error:
        if is_out_of_memory(error):
            rank, *_ = read_rank()
            (run_folder / f"{OUT_OF_MEMORY}{rank}").touch()
        raise


def longest_first(plan: Plan, task: Task) -> Task:
    """The same task with the longest samples alone in every step, where its sampler knows lengths."""
    data = adapt_train(task)
    if isinstance(data.source, Stream) or getattr(data.sampler, "lengths", None) is None:
        return task
    ids = longest(data, min(plan.batch, data.source.num_samples))
    return replace(task, sampler=Subset(np.sort(ids), shuffle=False), drop_last=False)


def read_probe(folder: Path) -> ProbedMemory:
    """What a probe measured."""
    values: dict[str, Any] = json.loads((folder / FILE).read_text())
    return ProbedMemory(**values)


def read_available(folder: Path) -> int | None:
    """What the rank with the least memory had; None if no rank came so far."""
    return min((int(path.read_text()) for path in folder.glob(f"{AVAILABLE}*")), default=None)


def ran_out(folder: Path) -> bool:
    """Whether a rank of a probe ran out of memory."""
    return any(folder.glob(f"{OUT_OF_MEMORY}*"))
