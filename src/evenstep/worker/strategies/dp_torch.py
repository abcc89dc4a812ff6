"""torch's own nn.DataParallel, to be compared with: on several cards, driven from the first one."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from evenstep.worker.spread import Bound, Spread
from evenstep.worker.strategies.single import Sample, Single
from evenstep.worker.tap import Tap
from evenstep.worker.world import World


class TorchDP(Single):
    """Splits each call of the model over the cards and gathers its outputs on the first one, where the loss is."""

    drives_from_first: ClassVar[bool] = True

    def spread(self, model: nn.Module, world: World, sample: Sample | None = None) -> Spread:
        model.to(world.device)
        cards = [device.index for device in (world.device, *world.lent)]
        # Evaluation goes without: people's metrics call methods that the wrapper hides.
        return Spread(model, [Bound(nn.DataParallel(model, cards))], [Bound(model)])

    def tell(self, spread: Spread, tap: Tap) -> None:
        """Nothing can be told: it scatters, replicates and gathers inside forward and backward."""
