"""Going on with a change: another batch, a longer schedule, another optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import evenstep
from evenstep import Task
from evenstep.errors import CheckpointError, PlanError

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
SCHEDULERS = {
    "multi-step": lambda o, n: lr_scheduler.MultiStepLR(o, [3, 6]),
    "cosine": lambda o, n: lr_scheduler.CosineAnnealingLR(o, n),
    "one-cycle": lambda o, n: lr_scheduler.OneCycleLR(o, 0.1, total_steps=n + 1),
    "sequence": lambda o, n: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
    ),
}


def make(scheduler: str = "cosine", optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> Task:
    return Task(
        model=lambda: nn.Linear(4, 2),
        train=x,
        loss=lambda model, batch: F.mse_loss(model(batch), batch[:, :2]),
        optimizer=lambda parameters: optimizer(parameters, lr=0.1),
        scheduler=SCHEDULERS[scheduler],
        batch=16,
        epochs=2,
    )


def train(task: Task, **choices: object) -> evenstep.Record:
    return evenstep.train(task, progress=False, **choices)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
def test_every_scheduler_goes_on_as_if_nothing_had_happened(scheduler: str) -> None:
    whole = train(make(scheduler), name="whole", checkpoint_every=3, keep=9)
    on = train(make(scheduler), resume="runs/whole/checkpoints/step-00000003", name="on")
    assert [step.lr for step in on.steps] == [step.lr for step in whole.steps[3:]]
    assert on.losses == whole.losses[3:]


def test_a_longer_run_follows_the_longer_schedule() -> None:
    train(make(), name="short")
    longer = train(make(), epochs=4, name="long")
    on = train(make(), resume="runs/short", epochs=4, name="on")
    assert [step.lr for step in on.steps] == pytest.approx([step.lr for step in longer.steps[8:]], rel=1e-9)


def test_another_batch_still_ends_after_the_same_samples() -> None:
    train(make(), name="first", checkpoint_every=6, keep=9)
    on = train(make(), resume="runs/first/checkpoints/step-00000006", batch=8, name="on")
    assert [step.samples for step in on.steps] == [8, 8, 8, 8]
    assert on.summary is not None
    assert (on.summary.steps, on.summary.samples) == (4, 32)


def run_of(lr: float, weight_decay: float = 0.0, scheduler: str | None = None, num_steps: int = 8) -> evenstep.Run:
    """A loop of one's own, two groups of parameters."""
    team = evenstep.join("single", devices=("cpu",))
    model = team.wrap(nn.Linear(4, 2))
    groups = [{"params": [model.module.weight]}, {"params": [model.module.bias], "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay)
    schedule = SCHEDULERS[scheduler](optimizer, num_steps) if scheduler else None
    return evenstep.Run(team, model, optimizer, team.loader(x, batch=16), schedule, num_steps)


@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
def test_what_the_optimizer_was_made_with_is_said_where_the_checkpoint_has_another(scheduler: str | None) -> None:
    before = run_of(0.1, scheduler=scheduler)
    for batch in before.loader:
        before.team.backward(lambda model, batch: model(batch).square().mean(), before.models[""], batch)
        before.team.step(before.optimizers[""])
        if before.scheduler is not None:
            before.scheduler.step()
    path = before.save("mine")
    assert run_of(0.1, scheduler=scheduler).load("mine").notes == []
    said = run_of(0.3, 0.2, scheduler).load("mine").notes
    rate = "the checkpoint's learning rate, 0.1, is kept; the one of this task's optimizer, 0.3, is not used"
    decay = "the checkpoint's weight decay, 0.0, is kept; the one of this task's optimizer, 0.2, is not used"
    # What OneCycleLR is given goes before the optimizer's own.
    advice = f"; for that, start from its weights: --resume {path.resolve()}/weights.safetensors"
    assert said == [line + advice for line in ([decay] if scheduler == "one-cycle" else [rate, decay])]
    if scheduler is not None:
        longer = run_of(0.3, scheduler=scheduler, num_steps=12).load("mine").notes
        assert longer == ["the schedule was made for 8 steps and is now made for 12"]


def test_a_rate_that_was_reduced_on_the_way_is_not_taken_for_another_one_in_the_task() -> None:
    before = run_of(0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(before.optimizers[""], patience=0)
    for _ in range(3):
        plateau.step(1.0)
    before.save("mine")
    for folder in ("mine", "again"):
        on = run_of(0.1)
        assert on.load(folder).notes == []
        assert on.optimizers[""].param_groups[0]["lr"] == pytest.approx(0.001)
        on.save("again")
    (said,) = run_of(0.3).load("again").notes
    assert "the checkpoint's learning rate, 0.1, is kept; the one of this task's optimizer, 0.3" in said


def test_another_optimizer_is_refused() -> None:
    train(make(), name="first", steps=3)
    with pytest.raises(CheckpointError, match="trained with SGD and the optimizer is now Adam"):
        train(make(optimizer=torch.optim.Adam), resume="runs/first", steps=6)


def test_the_users_own_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(make(), steps=2)
    assert torch.equal(torch.rand(3), expected)


FILE = """
import torch
from torch import nn
from evenstep import Task


def task() -> Task:
    return Task(
        model=lambda: nn.Linear(4, 2),
        train=torch.ones(64, 4),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=16,
    )
"""


def test_a_repeated_command_is_continued_and_another_one_is_refused() -> None:
    Path("my_task.py").write_text(FILE)
    again = partial(evenstep.train, "my_task.py", progress=False, name="mine", resume="auto")
    assert len(again(epochs=1).steps) == 4
    assert len(again(epochs=1).steps) == 4
    with pytest.raises(PlanError, match=r"mine was not begun with --batch 8 --epochs 3, and .*\n.* --resume runs/mine"):
        again(epochs=3, batch=8)
    assert len(again(epochs=1, batch=16).steps) == 4
