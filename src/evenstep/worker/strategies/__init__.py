"""How one model is spread over a World; chosen once, at the edge: `STRATEGIES[plan.strategy]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeVar

from torch import nn

from evenstep.worker.spread import Spread
from evenstep.worker.strategies.ddp import DDP
from evenstep.worker.strategies.dp import DP
from evenstep.worker.strategies.dp_torch import TorchDP
from evenstep.worker.strategies.fsdp import FSDP
from evenstep.worker.strategies.single import Sample, Single
from evenstep.worker.tap import Tap
from evenstep.worker.world import World

T = TypeVar("T")


class Strategy(Protocol):
    """All that the rest of evenstep knows about a strategy."""

    processes_per_device: ClassVar[bool]
    """True: one process for each device. False: one process drives them all."""
    drives_from_first: ClassVar[bool]
    """True: whole batches go to the first device, and the engine spreads them over the others by itself."""

    def spread(self, model: nn.Module, world: World, sample: Sample | None = None) -> Spread:
        """The model on every seat of this process; `sample` may be computed once, of a copy."""

    def refresh(self, spread: Spread, is_training: bool) -> None:
        """Give every seat the current weights; before an evaluation also rank 0's buffers, which are those saved."""

    def on_seats(self, work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        """`work(*arguments[i])` for each seat of this process."""

    def syncing(self, spread: Spread, is_last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: gradients travel only in the last one of a step."""

    def tell(self, spread: Spread, tap: Tap) -> None:
        """From now on, tell the tap of all that travels between devices, and send nothing while it is muted."""


STRATEGIES: dict[str, type[Strategy]] = {"single": Single, "dp": DP, "ddp": DDP, "fsdp": FSDP, "dp-torch": TorchDP}
