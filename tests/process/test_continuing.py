"""Going on with a change: another batch, a longer schedule, another optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import evenstep
from evenstep import Task
from evenstep.errors import CheckpointError

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
