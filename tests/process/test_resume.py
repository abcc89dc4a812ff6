"""A checkpoint of any strategy and size goes on under any other, with the losses of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import evenstep
from evenstep import Task
from evenstep.plan import Plan
from tests.fleet import furthest, result, run_jobs
from tests.marks import num_steps
from tests.more_flags import more_fields
from tests.small_tasks import NUM_SAMPLES, small_task

TASK = "mlp/adamw/pair"
CUT = 16  # in the middle of the second epoch of 11 steps
STEPS = num_steps(24, 30)
WORLDS = {
    1: ["single-1", "dp-1", "dp-2", "dp-3", "ddp-1", "fsdp-1"],
    2: ["ddp-2", "fsdp-2", "tensor-2", "pipeline-2"],
    3: ["ddp-3", "fsdp-3"],
}
WHERES = [where for wheres in WORLDS.values() for where in wheres]


def plan(where: str) -> Plan:
    strategy, _, num = where.partition("-")
    devices = ("cpu",) * int(num)
    usual = Plan(strategy=strategy, devices=devices, batch=10, steps=STEPS, precision="fp64", accumulate=2, threads=1)
    return replace(usual, **more_fields(len(devices), strategy))


PAIRS = [(source, target) for source in WHERES for target in WHERES]
# Without `slow`: every strategy on both sides.
QUICK = [("single-1", "ddp-2"), ("ddp-2", "dp-2"), ("dp-2", "fsdp-2"), ("fsdp-2", "single-1")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    of_this = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {pair for item in of_this if (pair := item.callspec.params.get("pair"))} | {("ddp-2", "dp-2")}
    sources = {"single-1", *(source for source, _ in wanted)}
    folder = tmp_path_factory.mktemp("resume")
    for size, every in WORLDS.items():
        wheres = [where for where in every if where in sources]
        if not wheres:
            continue
        # The length is the whole run's, for the schedule depends on it; a checkpoint is written on the way.
        run_jobs(folder, size, [(w, replace(plan(w), checkpoint_every=CUT, keep=9), TASK) for w in wheres])
    for size, wheres in WORLDS.items():
        jobs = [
            (
                f"{source}_to_{w}",
                replace(plan(w), resume=str(folder / source / "checkpoints" / f"step-{CUT:08d}")),
                TASK,
            )
            for w in wheres
            for source in WHERES
            if (source, w) in wanted
        ]
        if jobs:
            run_jobs(folder, size, jobs)
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "pair", [pytest.param(p, id="-to-".join(p), marks=() if p in QUICK else pytest.mark.slow) for p in PAIRS]
)
def test_goes_on_as_if_nothing_had_happened(runs: Path, pair: tuple[str, str]) -> None:
    undisturbed, resumed = result(runs, "single-1"), result(runs, "_to_".join(pair))
    assert [step.step for step in resumed.record.steps] == list(range(CUT + 1, STEPS + 1))
    assert resumed.record.losses == pytest.approx(undisturbed.record.losses[CUT:], rel=1e-9)
    assert [step.lr for step in resumed.record.steps] == [step.lr for step in undisturbed.record.steps[CUT:]]
    assert furthest(resumed.weights, undisturbed.weights) < 1e-9


def test_an_epoch_that_was_cut_holds_every_sample_once(runs: Path) -> None:
    first = result(runs, "ddp-2").record.steps[11:CUT]
    rest = result(runs, "ddp-2_to_dp-2").record.steps[: 22 - CUT]
    assert sum(step.samples for step in [*first, *rest]) == NUM_SAMPLES


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "dampened": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_resumed", [False, True], ids=["undisturbed", "resumed"])
def test_a_parameter_that_had_no_state_yet_gets_its_first_gradient_later(optimizer: str, is_resumed: bool) -> None:
    """As the experts of a mixture do that were idle so far; the eighth step is the first that uses `other`."""
    task = replace(small_task("later/sgd/mean"), scheduler=None, optimizer=OPTIMIZERS[optimizer])
    if is_resumed:
        evenstep.train(task, batch=10, steps=5, name="first")
    evenstep.train(task, batch=10, steps=10, name="ours", resume="runs/first" if is_resumed else None)
    assert furthest(result(Path("runs"), "ours").weights, by_torch_alone(task)) < 1e-6


def test_what_a_killed_run_kept_for_its_next_checkpoint_is_deleted_when_another_continues_it() -> None:
    task = small_task(TASK)
    evenstep.train(task, batch=10, steps=3, name="killed")
    spare = Path("runs/killed/checkpoints/.spare-checkpoint")
    spare.mkdir()
    (spare / "weights.safetensors").write_bytes(b"large")
    evenstep.train(task, batch=10, steps=5, name="next", resume="runs/killed")
    assert not spare.exists()


def by_torch_alone(task: Task) -> dict[str, torch.Tensor]:
    """The same steps, by the optimizer as the task makes it."""
    team = evenstep.join("single")
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()))
    for batch in islice(team.loader(task.train, batch=10), 10):
        optimizer.zero_grad()
        task.loss(model, batch.micro_batches[0][0].data).backward()
        optimizer.step()
    return model.state_dict()
