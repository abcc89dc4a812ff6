"""Learning-rate schedules as people write them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

import evenstep
from evenstep import Task
from evenstep.errors import PlanError, TaskError
from evenstep.record import Record
from evenstep.task import lengths_taken
from tests.marks import first_is_quick

x = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))


def task(scheduler: Callable[..., LRScheduler]) -> Task:
    return Task(
        model=lambda: nn.Linear(3, 1),
        train=(x,),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        scheduler=scheduler,
        batch=6,
        epochs=2,
    )


def trained(scheduler: Callable[..., LRScheduler], **choices: Any) -> None:
    evenstep.train(task(scheduler), devices=1, threads=1, **choices)


def test_one_that_was_meant_for_epochs_is_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    trained(lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    said = " ".join(capfd.readouterr().err.split())
    assert (
        "the learning rate fell from 0.1 to 9.54e-08 in the first epoch: the scheduler is stepped after every "
        'optimizer step (20 per epoch), not after every epoch; for that, write Task(..., schedule_every="epoch")'
    ) in said


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer, num_steps: CosineAnnealingLR(optimizer, num_steps),
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 20),
        lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 1000)),
    ],
    ids=["cosine", "restarts each epoch", "long warm-up"],
)
def test_a_sound_one_is_not(scheduler: Any, capfd: pytest.CaptureFixture[str]) -> None:
    trained(scheduler)
    assert "learning rate" not in capfd.readouterr().err


def test_one_that_ends_with_the_run_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    trained(lambda optimizer, num_steps: CosineAnnealingLR(optimizer, num_steps), epochs=1)
    assert "learning rate" not in capfd.readouterr().err


TASK = """
import os, signal
from pathlib import Path
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from evenstep import Task

x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))

class Counted(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
            if int(self.calls) == int(os.environ.get("KILLED_AT", 0)) and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

schedules = {
    "epoch": lambda optimizer: StepLR(optimizer, 2, gamma=0.1),
    # The rate is so large that the loss does not fall: a plateau.
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
    "lengths": lambda optimizer, num_steps, steps_per_epoch: OneCycleLR(
        optimizer, 0.1, total_steps=num_steps, pct_start=steps_per_epoch / num_steps
    ),
}

def task(kind: str = "epoch") -> Task:
    return Task(
        model=Counted,
        train=(x,),
        valid=(x[:7],),
        loss=lambda model, batch: (model(batch[0]) - 1).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.8, momentum=0.9),
        scheduler=schedules[kind],
        schedule_every="epoch" if kind == "epoch" else "step",
        batch=6,
        epochs=6,
    )
"""
KINDS = ("epoch", "plateau", "lengths")


def rates(name: str, *arguments: str, **environment: str) -> list[float]:
    """The learning rates of a run's steps."""
    Path("my_task.py").write_text(TASK)
    command = [
        sys.executable,
        "-m",
        "evenstep",
        "train",
        "my_task.py",
        "--name",
        name,
        "--precision",
        "fp64",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return [step.lr for step in Record.read(Path("runs") / name).steps]


def by_torch(name: str, kind: str) -> list[float]:
    """What torch's scheduler gives, stepped by hand, with the evaluations of a run."""
    record = Record.read(Path("runs") / name)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8, momentum=0.9)
    scope: dict[str, Any] = {}
    exec(TASK, scope)
    lengths = {"num_steps": 30, "steps_per_epoch": 5} if kind == "lengths" else {}
    scheduler = scope["schedules"][kind](optimizer, **lengths)
    found = []
    for step in range(1, 31):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if kind == "lengths" or step % 5 == 0:
            values = [one.values["loss"] for one in record.evaluations if one.step == step]
            scheduler.step(*(values if kind == "plateau" else ()))
    return found


@pytest.mark.parametrize("kind", first_is_quick(["plateau", *(kind for kind in KINDS if kind != "plateau")]))
def test_steps_epochs_and_evaluations_are_counted_as_by_hand(kind: str) -> None:
    one = rates("one", f"kind={kind}")
    assert one == by_torch("one", kind)
    assert len(set(one)) > 2
    assert rates("two", f"kind={kind}", "--strategy", "ddp", "--devices", "cpu,cpu") == one


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_strategies_too(kind: str, strategy: str) -> None:
    one = rates("one", f"kind={kind}")
    assert rates("two", f"kind={kind}", "--strategy", strategy, "--devices", "cpu,cpu") == one


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plateau", pytest.param("epoch", marks=pytest.mark.slow)])
def test_a_killed_run_keeps_its_schedule(kind: str) -> None:
    two = ("--strategy", "ddp", "--devices", "cpu,cpu")
    whole = rates("whole", f"kind={kind}", *two)
    often = ("--restarts", "1", "--checkpoint-every", "4")
    assert rates("killed", f"kind={kind}", *two, *often, KILLED_AT="23") == whole
    assert len(Record.read("runs/killed").restarts) == 1
    assert Record.read("runs/killed").losses == Record.read("runs/whole").losses


# The last step is evaluated; within an epoch that would be one evaluation more.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps"), [("epoch", 17), ("plateau", 15)])
def test_a_run_of_more_epochs_goes_on_with_its_schedule(kind: str, steps: int) -> None:
    whole = rates("whole", f"kind={kind}")
    rates("first", f"kind={kind}", "--steps", str(steps))
    assert rates("second", "--resume", "runs/first", "--epochs", "6") == whole[steps:]


def test_a_plateau_needs_evaluations_and_the_right_end_of_the_metric() -> None:
    with pytest.raises(TaskError, match="stepped after each evaluation, and the task has no data for one"):
        trained(ReduceLROnPlateau)
    Path("my_task.py").write_text(TASK)
    with pytest.raises(
        TaskError, match=r"waits for a min of loss, whose max is best; write ReduceLROnPlateau\(optimizer"
    ):
        evenstep.train("my_task.py", options={"kind": "plateau"}, best="loss:max")


@pytest.mark.slow
def test_the_task_may_name_the_metric_of_its_plateau_so_that_verify_needs_no_flag() -> None:
    rising = TASK.replace("patience=1)", "patience=1, mode='max')").replace("batch=6,", "batch=6, best='loss:max',")
    Path("my_task.py").write_text(rising)
    record = evenstep.train("my_task.py", options={"kind": "plateau"}, progress=False, threads=1)
    assert record.plan.best == "loss:max"
    command = [sys.executable, "-m", "evenstep", "verify", "my_task.py", "kind=plateau", "--strategies", "dp"]
    done = subprocess.run([*command, "--steps", "2"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stream_has_no_steps_per_epoch() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(x)

    made = task(lambda optimizer, steps_per_epoch: StepLR(optimizer, steps_per_epoch))
    with pytest.raises(PlanError, match="the scheduler takes the steps of an epoch, and a stream has no length"):
        evenstep.train(evenstep.Task(**{**vars(made), "train": Stream()}), steps=3)


def test_parameters_get_lengths_by_their_names() -> None:
    assert lengths_taken(partial(StepLR, step_size=3)) == {}
    assert lengths_taken(ReduceLROnPlateau) == {}
    assert lengths_taken(lambda optimizer, num_steps=None, warmup=3: None) == {"num_steps": "num_steps"}
    both = {"total": "num_steps", "steps_per_epoch": "steps_per_epoch"}
    assert lengths_taken(lambda optimizer, total, steps_per_epoch: OneCycleLR) == both


def test_a_custom_loop_saves_and_loads_its_plateau() -> None:
    def made() -> tuple[evenstep.Run, ReduceLROnPlateau]:
        team = evenstep.join("single", devices=("cpu",))
        model = team.wrap(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, patience=1)
        return evenstep.Run(team, model, optimizer, team.loader(x, batch=6), plateau), plateau

    run, before = made()
    for loss in (1.0, 2.0):
        before.step(loss)
    run.save("mine")
    run, after = made()
    run.load("mine")
    assert (after.best, after.num_bad_epochs) == (1.0, 1)
    after.step(2.0)
    assert run.optimizers[""].param_groups[0]["lr"] == pytest.approx(0.01)
