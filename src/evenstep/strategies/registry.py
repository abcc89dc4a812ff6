"""How one model is distributed over a World; chosen once: `load_strategy(plan.strategy)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeVar

from torch import nn

from evenstep.distributed.world import World
from evenstep.profiling.spans import Tap
from evenstep.strategies.base import DistributedModel
from evenstep.strategies.single import Sample

T = TypeVar("T")


class Strategy(Protocol):
    """All that the rest of evenstep knows about a strategy."""

    processes_per_device: ClassVar[bool]
    """True: one process for each device. False: one process drives them all."""
    drives_from_first: ClassVar[bool]
    """True: whole batches go to the first device, and the engine spreads them over the others by itself."""

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        """The model on every seat of this process; `sample` may be computed once, of a copy."""

    def refresh(self, spread: DistributedModel, is_training: bool) -> None:
        """Give every seat the current weights; before an evaluation also rank 0's buffers, which are those saved."""

    def on_replicas(self, work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        """`work(*arguments[i])` for each seat of this process."""

    def syncing(self, spread: DistributedModel, is_last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: gradients travel only in the last one of a step."""

    def tell(self, spread: DistributedModel, tap: Tap) -> None:
        """From now on, tell the tap of all that travels between devices, and send nothing while it is muted."""
