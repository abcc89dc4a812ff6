"""What a team does not train, because it would go wrong without a word."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from evenstep.errors import TaskError
from evenstep.worker.optimizers import refuse_closure, refuse_sharded
from evenstep.worker.scaler import unfitted
from evenstep.worker.spread import Spread
from evenstep.worker.world import World


class Refusals:
    """Knows what was spread, and looks at everything new once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: set[int] = set()
        self._trainable: dict[Spread, list[bool]] = {}
        self._checked: WeakSet[torch.optim.Optimizer] = WeakSet()

    def learn(self, model: Spread) -> None:
        """A model that was spread."""
        self._known |= {id(weight) for weight in model.weights}
        self._trainable[model] = [weight.requires_grad for weight in model.weights]

    def refuse_model(self, model: Spread) -> None:
        """Before each backward."""
        # The engines are told at the start which parameters train; later changes would reach one copy of several.
        if self._world.num_seats > 1 and [w.requires_grad for w in model.weights] != self._trainable[model]:
            raise TaskError(
                "requires_grad of some parameters changed after team.spread; set it before the model is spread"
            )
        if model.is_checked:
            return
        # One that has seen no data would let everything through as it is.
        if unfitted(model.module):
            raise TaskError(
                "the model has a Scaler that has seen no data; fit it before the model is spread:\n"
                "scaler.fit(loader.whole_data(), team.world)"
            )
        model.is_checked = True

    def refuse_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Before each update: one over other parameters than those that were spread would train nothing.

        All ranks call this.
        """
        if optimizer in self._checked:
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if any(id(weight) not in self._known for weight in weights):
            raise TaskError(
                "the optimizer holds parameters that are not the team's; make it after team.spread, from what that "
                "returned:\nmodel = team.spread(Net()); optimizer = Adam(model.parameters())"
            )
        refuse_closure(optimizer)
        refuse_sharded(optimizer, self._world)
        self._checked.add(optimizer)


def refuse_lazy(model: nn.Module) -> None:
    """Raise TaskError for layers that get their shapes in their first forward: parameters are distributed before it."""
    lazy = [
        f"{name or 'the model'} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if any(map(is_lazy, (*layer.parameters(recurse=False), *layer.buffers(recurse=False))))
    ]
    if lazy:
        raise TaskError(
            f"{lazy[0]} has no shape before its first forward, and parameters are distributed before that;\n"
            "run one where the model is made: net = Net(); net(torch.zeros(1, 3, 32, 32)); return net"
        )
