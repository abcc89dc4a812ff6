"""Local steps between machines (local SGD, DiLoCo): ranks train alone for some steps, and then join what they found.

At the end of a round, the mean of how far the ranks have come is a gradient for an outer optimizer. That of `local`
goes there, to the mean of their weights (local SGD); that of `diloco` is SGD with Nesterov momentum (Douillard et al.
2023). The state of the inner optimizer, the task's own, is averaged as well: so all ranks are equal at the end of every
round, and a checkpoint of that moment is all there is.

`streaming` sends the weights in fragments, one after another, while the ranks take further steps (Douillard et al.
2025). Its rounds last until something needs equal ranks, such as a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from evenstep.distributed.machines import MachineSum, Message
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.link_method import LinkMethod
from evenstep.strategies.base import NOTHING, LossModule
from evenstep.strategies.ddp import RankModel, can_average, send_buffers, send_from_rank_0, trained

OUTER = {"local": (1.0, 0.0), "diloco": (0.7, 0.9), "streaming": (0.7, 0.9)}
"""Rate and momentum of the outer optimizer; of the second, as its authors found best for rounds of 50 to 500 steps."""
MIXED = 0.5
"""How far the weights of a rank go towards what the outer optimizer found for a fragment."""
MOMENTUM, GLOBAL = "outer_momentum", "global"
MESSAGE_NUMBERS = 2**20


class MeanOverRanks:
    """The means of tensors over ranks, all messages under way at once; the tensors stay as they are."""

    def __init__(self, sums: MachineSum, tensors: Sequence[torch.Tensor]) -> None:
        self._means: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
        self._sent: list[torch.futures.Future[torch.Tensor]] = []
        for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype is kind]
            flat = torch.cat([tensors[place].reshape(-1) for place in places])
            for place, mean in zip(places, flat.split([tensors[place].numel() for place in places]), strict=True):
                self._means[place] = mean.view(tensors[place].shape)
            self._sent += [sums.start(Message(part)) for part in flat.split(MESSAGE_NUMBERS)]

    def wait(self) -> list[torch.Tensor]:
        for one in self._sent:
            one.wait()
        return self._means


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
        """The weights at the beginning of the round; of fragments, what the outer optimizer found last."""

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        return NOTHING

    def begin_round(self) -> None:
        """Before the first step of a round."""
        if not self._start:
            self._start = [weight.detach().clone() for _, weight in self._trained]

    @torch.no_grad()
    def end_round(self, step: int, inner: Sequence[torch.Tensor]) -> None:
        """Join what the ranks found; `inner` are tensors of the optimizer's state, which become their mean."""
        moved = [start - weight for start, (_, weight) in zip(self._start, self._trained, strict=True)]
        self._average([*moved, *inner])
        for (name, weight), start, gradient in zip(self._trained, self._start, moved, strict=True):
            momentum = self._momentum[name].mul_(self._beta).add_(gradient)
            weight.copy_(start).sub_(gradient.add_(momentum, alpha=self._beta), alpha=self._rate)
        send_buffers(self)
        self._start = []

    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        """In place."""
        for tensor, mean in zip(tensors, MeanOverRanks(self._sums, tensors).wait(), strict=True):
            tensor.copy_(mean)

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


@dataclass(frozen=True)
class Fragment:
    """A part of all weights, as flat views of them and of what is kept of them."""

    weights: list[torch.Tensor]
    shared: list[torch.Tensor]
    """What the outer optimizer found last, which is the same on all ranks."""
    momentum: list[torch.Tensor]

    def moved(self) -> list[torch.Tensor]:
        """How far this rank has come from there."""
        return [shared - weight for shared, weight in zip(self.shared, self.weights, strict=True)]


class StreamingModel(LocalModel):
    """Fragments of the weights are sent one after another; each arrives when the next is sent, or the round ends."""

    def __init__(self, model: nn.Module, world: World, method: LinkMethod) -> None:
        super().__init__(model, world, method)
        self._method = method
        self._under_way: tuple[Fragment, MeanOverRanks] | None = None

    @torch.no_grad()
    def exchange_fragment(self, step: int) -> None:
        self._receive()
        number = self._method.fragment_after(step)
        if number is not None:
            fragment = self._fragment(number)
            self._under_way = fragment, MeanOverRanks(self._sums, fragment.moved())

    @torch.no_grad()
    def end_round(self, step: int, inner: Sequence[torch.Tensor]) -> None:
        """Ranks become their mean. The outer optimizer goes on from where it is, so that an early end moves nothing."""
        self._receive()
        self._average([*(weight for _, weight in self._trained), *inner])
        number = self._method.fragment_after(step)
        if number is not None:
            # All ranks have come as far: there is nothing to send.
            fragment = self._fragment(number)
            self._merge(fragment, fragment.moved())
        send_buffers(self)

    def _receive(self) -> None:
        if self._under_way is not None:
            fragment, means = self._under_way
            self._under_way = None
            self._merge(fragment, means.wait())

    def _merge(self, fragment: Fragment, gradients: Sequence[torch.Tensor]) -> None:
        """An outer step, towards which the weights go; the steps taken since the fragment was sent are in them."""
        rows = zip(fragment.weights, fragment.shared, fragment.momentum, gradients, strict=True)
        for weight, shared, momentum, gradient in rows:
            momentum.mul_(self._beta).add_(gradient)
            shared.sub_(gradient.add_(momentum, alpha=self._beta), alpha=self._rate)
            weight.lerp_(shared, MIXED)

    def _fragment(self, number: int) -> Fragment:
        weights = [weight.detach() for _, weight in self._trained]
        parts = fragment_parts([weight.numel() for weight in weights], number, self._method.num_fragments)
        kept = (weights, self._start, list(self._momentum.values()))
        return Fragment(*([_row(tensors[index])[part] for index, part in parts] for tensors in kept))

    def link_state(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self._trained]
        shared = dict(zip(names, self._start, strict=True)) if self._start else {}
        return {
            **super().link_state(),
            **{f"{name}/{GLOBAL}": value.contiguous().clone() for name, value in shared.items()},
        }

    def load_link_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().load_link_state(tensors)
        self._under_way = None
        self.begin_round()
        for (name, _), value in zip(self._trained, self._start, strict=True):
            if f"{name}/{GLOBAL}" in tensors:
                value.copy_(tensors[f"{name}/{GLOBAL}"])


def fragment_parts(sizes: Sequence[int], number: int, num_fragments: int) -> list[tuple[int, slice]]:
    """Which tensors belong to one of several fragments of equal size, and which part of each.

    >>> fragment_parts([6, 2], 0, 2), fragment_parts([6, 2], 1, 2)
    ([(0, slice(0, 4, None))], [(0, slice(4, 6, None)), (1, slice(0, 2, None))])
    """
    total = sum(sizes)
    first, end = (total * one // num_fragments for one in (number, number + 1))
    starts = [after - size for after, size in zip(accumulate(sizes), sizes, strict=True)]
    spans = [slice(max(first - start, 0), min(end - start, size)) for start, size in zip(starts, sizes, strict=True)]
    return [(index, span) for index, span in enumerate(spans) if span.start < span.stop]


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers as they lie in memory: a weight, and what is kept of it, lie in the same order."""
    return tensor.as_strided((tensor.numel(),), (1,))
