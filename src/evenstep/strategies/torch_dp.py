"""torch's own nn.DataParallel, to be compared with: on several GPUs, driven from the first one."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from evenstep.distributed.world import World
from evenstep.strategies.base import DistributedModel, LossModule, Sample


class TorchDP:
    """Splits each call of the model over the GPUs and gathers its outputs on the first one, where the loss is."""

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        model.to(world.device)
        return DataParallelModel(model, [device.index for device in (world.device, *world.delegated)])


class DataParallelModel(DistributedModel):
    """Scatters, replicates and gathers inside forward and backward, where nothing can be timed."""

    is_wrapped: ClassVar[bool] = True

    def __init__(self, model: nn.Module, gpus: list[int]) -> None:
        # Evaluation goes without: users' metrics call methods that the wrapper hides.
        super().__init__(model, [LossModule(nn.DataParallel(model, gpus))], [LossModule(model)])
