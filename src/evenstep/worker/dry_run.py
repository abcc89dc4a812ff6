"""A task tried on a few samples, on the CPU: what a step and an evaluation will compute, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from evenstep.draws import Draws, Ids
from evenstep.errors import EvenstepError, PlanError, TaskError
from evenstep.order import Lengths
from evenstep.plan import Plan
from evenstep.task import Task, describe
from evenstep.worker.batchnorm import is_local
from evenstep.worker.copies import copied
from evenstep.worker.evaluation import Evaluator, named
from evenstep.worker.loader import Piece
from evenstep.worker.persample import Touch
from evenstep.worker.precision import Precision
from evenstep.worker.source import Source, to_device
from evenstep.worker.spread import evaluating
from evenstep.worker.stream import Stream
from evenstep.worker.totals import Totals, as_sum
from evenstep.worker.world import World

NEEDS_TWO = "Expected more than 1 value per channel"
"""In what torch's BatchNorm says of one sample."""


@dataclass(frozen=True)
class Few:
    """A small batch."""

    data: Any
    ids: Ids


def few_samples(source: Source | Stream, touch: Touch, most: int = 4) -> Few:
    """The first samples of a stream; of other data the first ones, the one in the middle and the last."""
    if isinstance(source, Stream):
        return Few(*source.first(most, touch))
    last = source.num_samples - 1
    ids = np.array(sorted({0, min(1, last), last // 2, last})[:most], dtype=np.int64)
    return Few(source.fetch(ids, ids, touch), ids)


class DryRun:
    """A step and an evaluation of a throw-away model on the CPU; only what is certainly wrong is refused."""

    def __init__(self, plan: Plan, task: Task) -> None:
        self._plan = plan
        self._task = task
        self._world = World(0, 1, (torch.device("cpu"),))
        self._precision = Precision("fp64" if plan.precision == "fp64" else "fp32", self._world.device)
        self._model: nn.Module | None = None
        self._fault = ""
        """What is to be said if the next call fails."""

    def check(self, train: Few, valid: Few | None) -> None:
        """Compute what a step and an evaluation compute."""
        with self._refusing():
            self._fault = "the model cannot be built"
            # A copy: the task may hand out the one model that will be trained.
            self._model = copied(self._precision.fit(self._task.model()))
            if not self._model.training:
                # As the worker does; of a model in training mode, layers may be in eval mode on purpose.
                self._model.train()
            self._step(self._model, train)
            if valid is not None:
                with evaluating(self._model):
                    self._evaluate(self._model, valid)

    def check_alone(self, sample: Few, lengths: Lengths) -> None:
        """Take a step on one sample, as a device will that has no more of a batch."""
        model, plan = self._model, self._plan
        is_shared = plan.sync_batchnorm and min(plan.most_devices, *plan.batch_sizes(lengths)) > 1
        if model is None or (is_shared and is_local(model)):
            return
        with self._refusing(f"; {_where_alone(plan, lengths)}"):
            try:
                self._step(model, sample)
            except ValueError as error:
                if NEEDS_TWO not in str(error):
                    raise
                raise PlanError(_too_few_for_batchnorm(plan, lengths)) from error

    def _step(self, model: nn.Module, few: Few) -> None:
        data = to_device(few.data, self._precision.fit_tensor)
        if self._task.augment_batch is not None:
            self._fault = "augment_batch cannot be computed"
            data = self._task.augment_batch(data, Draws(few.ids, self._plan.seed, 0, self._world.device))
        self._fault = "the loss cannot be computed"
        Totals(self._world, 1).take(self._task.loss(model, data), Piece(data, few.ids[:0], 1))

    def _evaluate(self, model: nn.Module, few: Few) -> None:
        task, data = self._task, to_device(few.data, self._precision.fit_tensor)
        self._fault = "the loss of the valid data cannot be computed"
        as_sum(Evaluator()(task.loss, model, data), 1, "loss")
        if task.metrics is not None:
            self._fault = "the metrics cannot be computed"
            for name, amount in named(Evaluator()(task.metrics, model, data)).items():
                as_sum(amount, 1, name)

    @contextmanager
    def _refusing(self, hint: str = "") -> Iterator[None]:
        """Around what the user's code computes: its failure is a refusal, unless it may need another device."""
        task = self._task
        try:
            yield
        except EvenstepError:
            raise
        except Exception as error:
            if any(device != "cpu" for device in self._plan.devices):
                # The worker will say.
                self._model = None
                return
            if "valid" in self._fault and (task.augment is not None or task.augment_batch is not None):
                hint = "; augment and augment_batch change training samples alone"
            raise TaskError(f"{self._fault}: {describe(error)}{hint}") from error


def _where_alone(plan: Plan, lengths: Lengths) -> str:
    """Which steps leave a device with one sample."""
    size, step = plan.batch, "every step"
    if plan.smallest_micro_batch(size) > 1:
        size = min(size for size in plan.batch_sizes(lengths) if plan.smallest_micro_batch(size) == 1)
        step = "the last step of an epoch"
    devices = f" over {plan.most_devices} devices" * (plan.most_devices > 1)
    parts = f" in {plan.accumulate} micro-batches" * (plan.accumulate > 1)
    return f"{step} ({size} sample{'s' * (size > 1)}{devices}{parts}) has one sample for a device at once"


def _too_few_for_batchnorm(plan: Plan, lengths: Lengths) -> str:
    remedies = ["a DataLoader with drop_last=True"] * (plan.smallest_micro_batch(plan.batch) > 1)
    can_share = plan.strategy in ("ddp", "fsdp") and min(plan.most_devices, *plan.batch_sizes(lengths)) > 1
    remedies += ["--sync-batchnorm"] * can_share
    batch = _batch_for_two(plan, lengths)
    remedies += [f"--batch {batch}"] * (batch is not None)
    return (
        f"BatchNorm cannot be trained on one sample, and {_where_alone(plan, lengths)};\n"
        f"use {', or '.join(remedies) or 'fewer devices'}"
    )


def _batch_for_two(plan: Plan, lengths: Lengths) -> int | None:
    """The global batch nearest to the plan's with which a device always has two samples or more."""
    sizes = range(2 * plan.most_devices * plan.accumulate, min(2 * plan.batch, lengths.rest or 0) + 1)
    for size in sorted(sizes, key=lambda size: abs(size - plan.batch)):
        other = replace(plan, batch=size)
        if min(map(other.smallest_micro_batch, other.batch_sizes(lengths))) > 1:
            return size
    return None
