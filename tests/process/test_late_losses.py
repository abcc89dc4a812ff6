"""Losses that are read two steps later: what is freed before, and what is known when a step fails."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evenstep import Task
from evenstep.data.loader import Batch, MicroBatch
from evenstep.errors import NonFiniteLoss
from evenstep.plan import Plan
from evenstep.record import Step
from evenstep.training.loop import train
from evenstep.training.loss_weighting import LateLoss, not_finite
from evenstep.training.step import Recipe
from evenstep.training.team import Launched, join_team
from evenstep.training.trainer import Trainer

CPU = ("cpu",)


def squares(model: Any, batch: Any) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


class Late:
    """Steps as on a GPU: the loss is read when the loop asks for it."""

    lag = 2

    def __init__(self, recipe: Recipe, fails_at: int, spoilt: int) -> None:
        self.messages: list[str] = []
        self._recipe, self._fails_at, self._spoilt = recipe, fails_at, spoilt

    def recheck(self) -> None:
        pass

    def take(self, batch: Batch) -> Launched:
        number, recipe = batch.loader.num_finished + 1, self._recipe
        if number == self._fails_at:
            raise KeyError("broken")
        if number == self._spoilt:
            batch.micro_batches[0][0].inputs[0].fill_(math.nan)
        launched = recipe.team.launch(recipe.loss, (recipe.model,), batch)
        totals = launched.totals
        assert isinstance(totals, LateLoss)
        totals.keep(totals.values())
        totals.arrive()
        if number < self._spoilt:
            recipe.optimizer.step()
        recipe.optimizer.zero_grad()
        recipe.team.finish_batch()
        return launched


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Trainer]:
    data = torch.arange(96.0).reshape(24, 4) / 96, torch.ones(24, 1)
    task = Task(
        model=lambda: nn.Linear(4, 1),
        train=data,
        loss=squares,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    team = join_team("single", CPU, "fp32", 0, needs_group=False)
    made = Trainer(Plan(batch=2, devices=CPU, steps=10, epochs=None, strategy="single"), task, tmp_path, team)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("fails_at", "spoilt", "error", "rows"),
    [
        (6, 99, KeyError, [1, 2, 3, 4, 5]),
        # Steps behind a NaN have not changed the weights, though the loss of the next one may be finite.
        (6, 5, KeyError, [1, 2, 3, 4]),
        (6, 4, KeyError, [1, 2, 3]),
        (99, 5, NonFiniteLoss, [1, 2, 3, 4]),
    ],
)
def test_steps_before_one_that_fails_are_reported(
    job: Trainer, fails_at: int, spoilt: int, error: type[Exception], rows: list[int]
) -> None:
    job.stepper = Late(job._recipe(), fails_at, spoilt)
    known: list[int] = []
    with pytest.raises(error):
        known.extend(event.step for event in job.events() if isinstance(event, Step))
    assert known == rows
    assert not job.team.world.communication.is_off


def test_those_that_the_loop_would_have_read_by_now_are_no_rest(job: Trainer) -> None:
    found = []
    with pytest.raises(KeyError, match="broken"):
        found.extend(one.is_rest for one in train(job.run, Late(job._recipe(), 6, 99), job.plan, dict))
    assert found == [False, False, False, True, True]


def test_inputs_are_free_before_the_loss_is_read(job: Trainer) -> None:
    recipe = job._recipe()
    batch = next(iter(job.run.loader))
    inputs = [weakref.ref(one) for one in batch.micro_batches[0][0].inputs]
    launched = Late(recipe, 99, 99).take(batch)
    ids = batch.ids.tolist()
    del batch
    recipe.team.current = None
    gc.collect()
    assert [one() for one in inputs] == [None, None]
    assert math.isfinite(launched.read())
    assert launched.totals.parts[0].micro_batch.ids.tolist() == ids


def test_samples_whose_own_data_is_nan_are_named_where_the_data_is_still_there() -> None:
    data = torch.ones(3, 2), torch.tensor([1.0, math.inf, 1.0]), torch.arange(3)
    data[0][2, 1] = math.nan
    batch = MicroBatch(data, np.array([4, 17, 9]), 3)
    said = "rank 1 got nan for samples [4, 17, 9]"
    assert not_finite(1, [batch], [[math.nan, 3.0]]) == [
        f"{said}: among them [17, 9], whose own data is NaN or infinite"
    ]
    assert not_finite(1, [batch.without_inputs()], [[math.nan, 3.0]]) == [said]
