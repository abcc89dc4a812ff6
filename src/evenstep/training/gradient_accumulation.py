"""Gradient accumulation: forward and backward of every micro-batch of a step; the last one averages the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from evenstep.data.loader import Batch, MicroBatch
from evenstep.distributed.heartbeat import BACKWARD, FORWARD
from evenstep.distributed.world import World
from evenstep.strategies.base import NOTHING, DistributedModel, call, go_back, on
from evenstep.task import Amount
from evenstep.training.loss_context import LossContext
from evenstep.training.loss_weighting import LossTotal
from evenstep.training.precision import Precision
from evenstep.training.sync_batchnorm import standing_in


def accumulate_gradients(backward: ReplicaBackward, batch: Batch) -> None:
    """All micro-batches, one after the other; what `no_sync` is for in torch's DDP."""
    model = backward.models[0]
    if model.schedule is not None:
        model.schedule(backward, [micro_batch for (micro_batch,) in batch.micro_batches])
        return
    for number, per_replica in enumerate(batch.micro_batches, 1):
        is_last = number == len(batch.micro_batches)
        with model.sync_gradients(is_last):
            model.run(partial(backward, is_last), list(enumerate(per_replica)))


@dataclass(slots=True)
class ReplicaBackward:
    """Forward and backward of one micro-batch on one replica."""

    world: World
    precision: Precision
    loss: Callable[..., Amount]
    models: tuple[DistributedModel, ...]
    totals: LossTotal
    context: LossContext

    def computed(self, stage: Callable[..., Any], micro_batch: MicroBatch) -> Any:
        """What a stage of a pipeline makes of a micro-batch, where the loss is computed on another rank."""
        stands_in = NOTHING if micro_batch.num_samples else standing_in()
        device = self.world.device
        with on(device), self.context.on(0, micro_batch.num_samples), stands_in:
            self.world.spans.begin(FORWARD)
            with self.precision.autocast(device):
                output = stage(self.loss, micro_batch.inputs)
            self.world.spans.begin(BACKWARD)
            return output

    def goes_back(self) -> None:
        """A stage of a pipeline begins a backward."""
        self.world.spans.begin(BACKWARD)

    def staged(self, stage: Callable[..., Any], micro_batch: MicroBatch, sends: bool) -> tuple[torch.Tensor, float]:
        """The loss of a micro-batch on the last stage of a pipeline, and its weight in that of the batch."""
        stands_in = NOTHING if micro_batch.num_samples else standing_in()
        device = self.world.device
        with on(device), self.context.on(0, micro_batch.num_samples) as called, stands_in:
            self.world.spans.begin(FORWARD)
            with self.precision.autocast(device):
                amount = stage(self.loss, micro_batch.inputs)
            start, weight = self.totals.take(amount, micro_batch)
            if called.logged:
                self.totals.logs.take(called.logged, micro_batch.num_samples)
            if sends:
                self.totals.send()
            self.world.spans.begin(BACKWARD)
        return start, weight

    def __call__(self, is_last: bool, replica: int, micro_batch: MicroBatch) -> None:
        self.compute(is_last, replica, micro_batch)
        self.models[0].separate[replica]()

    def compute(self, is_last: bool, replica: int, micro_batch: MicroBatch) -> None:
        """The same; afterwards, gradients may share memory."""
        device = self.world.devices[replica]
        # In backward too, where activation checkpointing runs the forward again.
        stands_in = NOTHING if micro_batch.num_samples else standing_in()
        with on(device), self.context.on(replica, micro_batch.num_samples) as called, stands_in:
            self.world.spans.begin(FORWARD)
            with self.precision.autocast(device):
                amount = call(self.models, replica, self.loss, micro_batch.inputs)
            start, weight = self.totals.take(amount, micro_batch)
            if called.logged:
                self.totals.logs.take(called.logged, micro_batch.num_samples)
            self.world.spans.begin(BACKWARD)
            if is_last:
                self.totals.send()
            if self.precision.scaler is not None:
                start = self.precision.scaler.scale(start)
            go_back(start, weight, keeps_graph=bool(called.deferred))
            if called.deferred:
                called.finish_backward()
