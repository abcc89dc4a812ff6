"""Learning-rate schedules as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, StepLR

import evenstep
from evenstep import Task

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
        "optimizer step (20 per epoch), not after every epoch"
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
