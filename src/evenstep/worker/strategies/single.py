"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

from torch import nn

from evenstep.worker.seats import NOTHING, one_by_one
from evenstep.worker.spread import Bound, Spread
from evenstep.worker.streams import leave_default_stream
from evenstep.worker.tap import Tap
from evenstep.worker.world import World

T = TypeVar("T")
Sample = Callable[[nn.Module], object]
"""Computes of a model what a step does, for a strategy that needs to see it."""


class Single:
    """The small case that every other strategy is compared with."""

    processes_per_device: ClassVar[bool] = False
    drives_from_first: ClassVar[bool] = False

    def spread(self, model: nn.Module, world: World, sample: Sample | None = None) -> Spread:
        model.to(world.device)
        leave_default_stream(world.device)
        return Spread(model, [Bound(model)])

    def refresh(self, spread: Spread, is_training: bool) -> None:
        """Nothing: there is one copy."""

    def on_seats(self, work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        return one_by_one(work, arguments)

    def syncing(self, spread: Spread, is_last: bool) -> AbstractContextManager[None]:
        return NOTHING

    def tell(self, spread: Spread, tap: Tap) -> None:
        """Nothing: nothing travels."""
