"""An exponential moving average of the weights (`Task.ema`): updated after every step, evaluated and saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from evenstep.checkpoint.shards import is_sharded
from evenstep.errors import TaskError
from evenstep.strategies.base import DistributedModel


class WeightAverage:
    """Lies where the weights do: of a sharded weight each rank averages its shard, which is exact."""

    def __init__(self, models: Iterable[DistributedModel], decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise TaskError(f"ema is {decay}; it is the decay of the average, between 0 and 1, such as 0.999")
        weights = [weight for model in models for weight in model.parameters()]
        self._weights = [weight for weight in weights if weight.is_floating_point() or weight.is_complex()]
        self._average = get_ema_multi_avg_fn(decay)
        self._averages = [_local(weight).clone() for weight in self._weights]

    def update(self) -> None:
        """After a step: decay * average + (1 - decay) * weight."""
        self._average(self._averages, [_local(weight) for weight in self._weights], 0)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the weights as they are."""
        self._averages = [_local(weight).clone() for weight in self._weights]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the averages are the weights, for an evaluation or a checkpoint."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self._weights, self._averages, strict=True):
            local = _local(weight)
            kept = local.clone()
            local.copy_(average)
            average.copy_(kept)


def _local(weight: torch.Tensor) -> torch.Tensor:
    """Its numbers on this rank."""
    bare = weight.detach()
    return bare.to_local() if is_sharded(bare) else bare
