"""Local steps between machines (local SGD, DiLoCo): ranks train alone for some steps, and then join what they found.

At the end of a round, the mean of how far the ranks have come is a gradient for an outer optimizer. That of `local`
goes there, to the mean of their weights (local SGD); that of `diloco` is SGD with Nesterov momentum (Douillard et al.
2023). The state of the inner optimizer, the task's own, is averaged as well: so all ranks are equal at the end of every
round, and a checkpoint of that moment is all there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from evenstep.distributed.machines import MachineSum, Message
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.plan import LinkMethod
from evenstep.strategies.base import NOTHING, LossModule
from evenstep.strategies.ddp import RankModel, can_average, send_buffers, send_from_rank_0, trained

OUTER = {"local": (1.0, 0.0), "diloco": (0.7, 0.9)}
"""Rate and momentum of the outer optimizer; of the second, as its authors found best for rounds of 50 to 500 steps."""
MOMENTUM = "outer_momentum"
MESSAGE_NUMBERS = 2**20


class LocalModel(RankModel):
    """A whole model in each process, which exchanges nothing between two ends of a round."""

    def __init__(self, model: nn.Module, world: World, method: LinkMethod) -> None:
        if not all(world.gather(can_average(model))):
            raise TaskError(
                f"--link {world.communication.link} averages dense parameters of float32, float64 or bfloat16, and "
                "this model has others (sparse gradients, another type); leave --link out"
            )
        send_from_rank_0([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])
        super().__init__(model, [LossModule(model)])
        self._rate, self._beta = OUTER[method.name]
        self._sums = MachineSum.open(world, 8 * MESSAGE_NUMBERS)
        self._trained = trained(model)
        self._momentum = {name: torch.zeros_like(weight) for name, weight in self._trained}
        self._start: list[torch.Tensor] = []
        """The weights at the beginning of the round."""

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        return NOTHING

    def begin_round(self) -> None:
        """Before the first step of a round."""
        if not self._start:
            self._start = [weight.detach().clone() for _, weight in self._trained]

    @torch.no_grad()
    def end_round(self, inner: Sequence[torch.Tensor]) -> None:
        """Join what the ranks found; `inner` are tensors of the optimizer's state, which become their mean."""
        moved = [start - weight for start, (_, weight) in zip(self._start, self._trained, strict=True)]
        self._average([*moved, *inner])
        for (name, weight), start, gradient in zip(self._trained, self._start, moved, strict=True):
            momentum = self._momentum[name].mul_(self._beta).add_(gradient)
            weight.copy_(start).sub_(gradient.add_(momentum, alpha=self._beta), alpha=self._rate)
        send_buffers(self)
        self._start = []

    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        """In place, all messages under way at once."""
        kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
        for kind in kinds:
            of_kind = [tensor for tensor in tensors if tensor.dtype is kind]
            flat = torch.cat([tensor.reshape(-1) for tensor in of_kind])
            for sent in [self._sums.start(Message(part)) for part in flat.split(MESSAGE_NUMBERS)]:
                sent.wait()
            for tensor, mean in zip(of_kind, flat.split([one.numel() for one in of_kind]), strict=True):
                tensor.copy_(mean.view(tensor.shape))

    def link_state(self) -> dict[str, torch.Tensor]:
        if not self._beta:
            return {}
        return {f"{name}/{MOMENTUM}": value.contiguous().clone() for name, value in self._momentum.items()}

    def load_link_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, value in self._momentum.items():
            saved = tensors.get(f"{name}/{MOMENTUM}")
            value.zero_() if saved is None else value.copy_(saved)
        self._start = []

    def follow_requires_grad(self) -> None:
        raise TaskError("--link local averages the parameters that were trained at the start; freeze none in between")
