"""One process, one device."""

from __future__ import annotations

from torch import nn

from evenstep.distributed.devices import leave_default_stream
from evenstep.distributed.world import World
from evenstep.strategies.base import DistributedModel, LossModule, Sample


class Single:
    """The small case that every other strategy is compared with."""

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        model.to(world.device)
        leave_default_stream(world.device)
        return DistributedModel(model, [LossModule(model)])
