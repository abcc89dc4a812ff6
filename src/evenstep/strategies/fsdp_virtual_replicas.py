"""fsdp under virtual replicas: gradients stay whole on each rank until all its virtual replicas are done.

`fully_shard` would average them in an order of its own. Here each rank sums its virtual replicas as the tree says, then
sends every other rank the rows that it owns, and adds up what it gets, in the order of the tree: the bytes of a
reduce-scatter, and the bits of one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from evenstep.distributed.gradient_tree import Gradients, GradientTree, Layout
from evenstep.distributed.world import World
from evenstep.private_apis import fsdp_groups, gathered_parameter, give_shard
from evenstep.strategies.base import LossModule
from evenstep.strategies.fsdp import COST, ShardedModel, Unreached
from evenstep.strategies.fsdp_scalars import rows_of_ranks
from evenstep.strategies.unused_parameters import UnusedParameters, negative_zeros


class GatheredWeights(Sequence[torch.Tensor]):
    """The whole parameters that only torch sees, unit by unit; before a unit first ran, its shards."""

    def __init__(self, root: nn.Module) -> None:
        self.units = [group.fsdp_params for _, _, group in fsdp_groups(root)]
        self._parameters = [one for unit in self.units for one in unit]

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, index: Any) -> Any:
        return gathered_parameter(self._parameters[index])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(gathered_parameter, self._parameters)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Around a backward that counts for nothing, and is run because the other ranks run one."""
        kept = [weight.grad for weight in self]
        try:
            yield
        finally:
            for weight, gradient in zip(self, kept, strict=True):
                weight.grad = gradient


class TreeShardedModel(ShardedModel):
    """A shard of every parameter on each rank; gradients are summed in the order of the tree."""

    meets_in_forward: ClassVar[bool] = True

    def __init__(self, model: nn.Module, bound: LossModule, world: World, unreached: Unreached) -> None:
        super().__init__(model, bound, world, unreached)
        self._root.set_requires_gradient_sync(False)
        self._gathered = GatheredWeights(bound)
        self.weights_of = [self._gathered]  # type: ignore[list-item]
        names = {id(weight): name for name, weight in model.named_parameters()}
        sharded = [one.sharded_param for unit in self._gathered.units for one in unit]
        self._sharded: list[torch.Tensor] = sharded
        self._unused = UnusedParameters([names[id(weight)] for weight in sharded], world, COST, sees_sums=False)
        self.notes = self._unused.note.lines
        self._exchange = ShardExchange(self._gathered, world)

    def standing_in(self) -> AbstractContextManager[None]:
        return self._gathered.untouched()

    @torch.no_grad()
    def sum_trees(self, trees: Sequence[GradientTree], virtual: tuple[range, ...]) -> None:
        (tree,) = trees
        spans = self._world.spans
        spans.part("reduce")
        self._exchange(Layout.of(virtual), tree.sums)
        lacking = [
            index
            for index, weight in enumerate(self._sharded)
            if weight.requires_grad and all(gradients[index] is None for gradients in tree.sums)
        ]
        for index in self._unused.nowhere(lacking):
            self._sharded[index].grad = None
        spans.part("backward")


class ShardExchange:
    """Sums whole gradients over ranks, unit by unit, and leaves each rank the sum of its own rows."""

    def __init__(self, gathered: GatheredWeights, world: World) -> None:
        self._gathered, self._world = gathered, world

    def __call__(self, layout: Layout, sums: Sequence[Gradients]) -> None:
        """`sums` are those of this rank's nodes."""
        first = 0
        for unit in self._gathered.units:
            of_unit = [gradients[first : first + len(unit)] for gradients in sums]
            self._exchange(unit, layout, of_unit)
            first += len(unit)

    def _exchange(self, unit: Sequence[Any], layout: Layout, sums: Sequence[Gradients]) -> None:
        trained = [index for index, one in enumerate(unit) if one.sharded_param.requires_grad]
        if not trained:
            return
        size = self._world.size
        num = self._world.num_shards or size
        chunks = [[rows_of_ranks(_filled(of_node[index], unit[index]), num) for index in trained] for of_node in sums]
        shapes = [unit[index].sharded_size for index in trained]
        own = sum(shape.numel() for shape in shapes)
        to_ranks = [[of_weight[rank % num] for of_node in chunks for of_weight in of_node] for rank in range(size)]
        sent = [sum(part.numel() for part in parts) for parts in to_ranks]
        local = unit[trained[0]].sharded_param.to_local()
        packed = torch.cat([part for parts in to_ranks for part in parts] or [local.new_empty(0)])
        counts = [len(nodes) for nodes in layout.nodes]
        received = packed.new_empty(own * sum(counts))
        if self._world.communication.is_off:
            received.zero_()
        else:
            arrived = self._world.spans.send("reduce-scatter", [packed], waits=True)
            dist.all_to_all_single(received, packed, [own * count for count in counts], sent)
            arrived()
        rows = list(received.view(sum(counts), own))
        for one, other in layout.additions:
            rows[one] += rows[other]
        for index, values in zip(trained, rows[0].split([shape.numel() for shape in shapes]), strict=True):
            give_shard(unit[index], values.clone())


def _filled(gradient: torch.Tensor | None, parameter: Any) -> torch.Tensor:
    if gradient is not None:
        return gradient
    sharded = parameter.sharded_param
    return negative_zeros(torch.empty(sharded.shape, dtype=sharded.dtype, device=sharded.device))
