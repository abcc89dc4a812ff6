"""torch's own nn.DataParallel, to be compared with: on several cards, driven from the first one."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from evenstep.distributed.world import World
from evenstep.profiling.spans import Tap
from evenstep.strategies.base import DistributedModel, LossModule
from evenstep.strategies.single import Sample, Single


class TorchDP(Single):
    """Splits each call of the model over the cards and gathers its outputs on the first one, where the loss is."""

    drives_from_first: ClassVar[bool] = True

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        model.to(world.device)
        gpus = [device.index for device in (world.device, *world.lent)]
        # Evaluation goes without: people's metrics call methods that the wrapper hides.
        return DistributedModel(model, [LossModule(nn.DataParallel(model, gpus))], [LossModule(model)])

    def tell(self, spread: DistributedModel, tap: Tap) -> None:
        """Nothing can be told: it scatters, replicates and gathers inside forward and backward."""
