"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

from torch import nn

from evenstep.distributed.devices import leave_default_stream
from evenstep.distributed.world import World
from evenstep.profiling.spans import Tap
from evenstep.strategies.base import NOTHING, DistributedModel, LossModule, one_by_one

T = TypeVar("T")
Sample = Callable[[nn.Module], object]
"""Computes of a model what a step does, for a strategy that needs to see it."""


class Single:
    """The small case that every other strategy is compared with."""

    processes_per_device: ClassVar[bool] = False
    drives_from_first: ClassVar[bool] = False

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        model.to(world.device)
        leave_default_stream(world.device)
        return DistributedModel(model, [LossModule(model)])

    def refresh(self, spread: DistributedModel, is_training: bool) -> None:
        """Nothing: there is one copy."""

    def on_replicas(self, work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        return one_by_one(work, arguments)

    def syncing(self, spread: DistributedModel, is_last: bool) -> AbstractContextManager[None]:
        return NOTHING

    def tell(self, spread: DistributedModel, tap: Tap) -> None:
        """Nothing: nothing travels."""
