"""ddp with virtual replicas: gradients are summed over processes in the order of one tree, and never averaged.

On one machine's CPU the nodes of all processes are added in shared memory (allreduce.c). Elsewhere each process gets a
slice of every node (all-to-all), adds them in the order of the tree, and sends the sum to all: the bytes of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from evenstep.distributed.gradient_tree import Gradients, GradientTree, Layout, total
from evenstep.distributed.shm.allreduce import Channel, open_channel
from evenstep.distributed.shm.native import load
from evenstep.distributed.world import World
from evenstep.errors import TaskError, TrainingError
from evenstep.private_apis import refuse_different_shapes
from evenstep.strategies.base import LossModule, fills_memory
from evenstep.strategies.ddp import RankModel, can_average, send_buffers, send_from_rank_0, trained
from evenstep.strategies.unused_parameters import UnusedNote, negative_zeros

COST = (
    "ddp sums zeros for them, and lists them in the same message; "
    "freeze what is never trained: parameter.requires_grad_(False)"
)
Rows = list[torch.Tensor]
"""The gradients of one node: one-dimensional, in the order of memory."""


class Transport(Protocol):
    """How the nodes of all processes become one sum."""

    def sum_tree(self, nodes: Sequence[Rows], into: Rows, layout: Layout) -> None:
        """Sum tensors of one type; `into` may be one of the nodes."""


BUCKET_NUMBERS = 1 << 24
"""Numbers of each node that are sent at once."""


class AllToAll:
    """Over torch's collectives."""

    def __init__(self, world: World) -> None:
        self._world = world

    def sum_tree(self, nodes: Sequence[Rows], into: Rows, layout: Layout) -> None:
        flat = [torch.cat(rows) for rows in nodes]
        num = sum(row.numel() for row in into)
        summed = torch.empty(num, dtype=into[0].dtype, device=into[0].device)
        for start in range(0, num, BUCKET_NUMBERS):
            stop = min(start + BUCKET_NUMBERS, num)
            summed[start:stop] = self._summed([node[start:stop] for node in flat], summed[start:stop], layout)
        for row, values in zip(into, summed.split([row.numel() for row in into]), strict=True):
            row.copy_(values)

    def _summed(self, nodes: Rows, like: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The sum of one bucket: of each node, process r gets the r-th slice."""
        size, num = self._world.size, like.numel()
        each = -(-num // size)
        own = like.new_zeros(size, len(nodes), each)
        for which, node in enumerate(nodes):
            padded = torch.nn.functional.pad(node, (0, each * size - num))
            own[:, which] = padded.view(size, each)
        counts = [len(of_process) * each for of_process in layout.nodes]
        received = like.new_empty(sum(counts))
        dist.all_to_all_single(received, own.view(-1), counts, [len(nodes) * each] * size)
        (mine,) = total([[slice_] for slice_ in received.split(each)], layout)
        assert mine is not None
        found = like.new_empty(each * size)
        dist.all_gather_into_tensor(found, mine.contiguous())
        return found[:num]


class TreeSum:
    """Gives the weights of a model the sums of what all processes computed."""

    def __init__(self, transport: Transport, model: nn.Module, world: World) -> None:
        self._transport, self._world = transport, world
        self._is_broken = False
        self._names, self._weights = zip(*trained(model), strict=True)
        own = {id(weight) for weight in self._weights}
        self._indices = [index for index, weight in enumerate(model.parameters()) if id(weight) in own]
        """Of all parameters, those that are trained."""
        dtypes = [weight.dtype for weight in self._weights]
        self._kinds = [[i for i, one in enumerate(dtypes) if one == kind] for kind in dict.fromkeys(dtypes)]
        """The indices of weights, by type: those of one type are summed at a time."""
        self._lacks = torch.zeros(1, dtype=dtypes[0].to_real(), device=self._weights[0].device)
        """Summed with the gradients: whether a node lacks one."""
        self.note = UnusedNote(self._names, COST)

    @torch.no_grad()
    def __call__(self, tree: GradientTree, layout: Layout) -> None:
        spans = self._world.spans
        spans.part("reduce")
        gradients: list[Gradients] = [[sums[index] for index in self._indices] for sums in tree.sums]
        nodes = [list(map(self._whole, range(len(self._weights)), own)) for own in gradients]
        # Of a process without virtual replicas, memory for what others computed.
        into = nodes[0] if nodes else [torch.empty_like(weight) for weight in self._weights]
        arrived = spans.send("gradients", into)
        if self._is_broken:
            raise TrainingError("the sum of gradients was interrupted and cannot continue; start the run again")
        self._is_broken = True
        has_gaps = self._sum(nodes, into, layout, any(one is None for own in gradients for one in own))
        is_used = self._used(gradients, layout) if has_gaps else [True] * len(into)
        self._is_broken = False
        for weight, gradient, is_one in zip(self._weights, into, is_used, strict=True):
            weight.grad = gradient if is_one else None
        arrived()
        spans.part("backward")

    def _sum(self, nodes: list[Rows], into: Rows, layout: Layout, lacks: bool) -> bool:
        """Sum in place; returns whether a node of any process lacks a gradient."""
        flag = self._lacks.fill_(float(lacks))
        for number, indices in enumerate(self._kinds):
            rows = [[_flat(node[index]) for index in indices] for node in nodes]
            target = rows[0] if rows else [_flat(into[index]) for index in indices]
            if number == 0:
                target.append(flag)
                for row in rows[1:]:
                    row.append(torch.zeros_like(flag))
            self._transport.sum_tree(rows, target, layout)
        return bool(self._lacks.item())

    def _used(self, gradients: list[Gradients], layout: Layout) -> list[bool]:
        """Whether any process has a gradient of each weight."""
        used = torch.zeros(len(self._weights), dtype=self._lacks.dtype, device=self._lacks.device)
        nodes = [[torch.tensor([float(one is not None) for one in own]).to(used)] for own in gradients]
        self._transport.sum_tree(nodes, nodes[0] if nodes else [used], layout)
        found = nodes[0][0] if nodes else used
        self.note.say(found / len(layout.leaves))
        return [bool(one) for one in (found > 0).tolist()]

    def _whole(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """A gradient that lies in memory as its weight does; zeros that change no number, where there is none."""
        weight: nn.Parameter = self._weights[index]
        if gradient is None:
            return negative_zeros(weight)
        if gradient.dtype is not weight.dtype:
            raise TaskError(
                f"the gradient of {self._names[index]} is {gradient.dtype} and its weight {weight.dtype}; ddp sums "
                "gradients of their weights' type: leave grad_dtype as it is"
            )
        return gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers in the order of memory; of complex ones, both parts."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.as_strided((real.numel(),), (1,))


class SummedModel(RankModel):
    """A whole model in each process, without torch's DistributedDataParallel around it."""

    def __init__(self, model: nn.Module, world: World) -> None:
        send_from_rank_0([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])
        super().__init__(model, [LossModule(model)])
        self._world = world
        self._prepare()

    def _prepare(self) -> None:
        self._tree_sum = TreeSum(_transport(self.module, self._world), self.module, self._world)
        self.notes = self._tree_sum.note.lines

    def sync_replicas(self, is_training: bool) -> None:
        if not is_training:
            send_buffers(self)
        elif self.has_buffers:
            send_buffers(self, self._world)

    def sum_trees(self, trees: Sequence[GradientTree], virtual: tuple[range, ...]) -> None:
        (tree,) = trees
        if not self._world.communication.is_off:
            self._tree_sum(tree, Layout.of(virtual))
            return
        for weight, gradient in zip(self.weights, tree.sums[0] if tree.sums else (), strict=False):
            weight.grad = gradient

    def follow_requires_grad(self) -> None:
        self._prepare()


def _transport(model: nn.Module, world: World) -> Transport:
    weights: list[torch.Tensor] = [weight for _, weight in trained(model)]
    refuse_different_shapes(dist.group.WORLD, weights)
    if not all(fills_memory(weight) or not weight.numel() for weight in weights):
        raise TaskError(
            "--virtual-replicas sums gradients as they lie in memory, and a parameter has gaps; make it contiguous"
        )
    shared = world.communication
    channel: Channel | None = None
    if shared.scalars is not None and shared.may_share and all(world.gather(can_average(model))):
        channel = open_channel(world.gather, world.rank, sum(weight.nbytes for weight in weights), load())
    return channel if channel is not None else AllToAll(world)
