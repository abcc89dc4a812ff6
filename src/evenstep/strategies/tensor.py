"""One process per device; the ranks of a replica compute a part of each split layer, and sum what they computed.

With `--mesh fsdp=2,tensor=2`, the replicas shard what their ranks hold: `fully_shard` gathers this rank's slices of a
block, beside its whole layers, from the ranks that have the same ones of other replicas.

torch's `parallelize_module` is not used: it has no plan for nn.MultiheadAttention, its DTensors cannot be clipped or
updated beside plain tensors, and it splits a packed Linear for queries, keys and values without a word, wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from evenstep.distributed.devices import leave_default_stream
from evenstep.distributed.parameter_slices import ParameterSlice, PartOfParameter, note_sharded, slice_of, slices_of
from evenstep.distributed.world import Communication, World
from evenstep.errors import TaskError
from evenstep.strategies.base import NOTHING, DistributedModel, LossModule, Sample
from evenstep.strategies.ddp import Averaging, send_buffers, send_from_rank_0, trained
from evenstep.strategies.single import Single
from evenstep.strategies.tensor_layers import (
    ReplicaRanks,
    split_attention,
    split_dropout,
    split_inputs,
    split_outputs,
)
from evenstep.strategies.tensor_plan import SplitPlan, plan_of

if TYPE_CHECKING:
    from evenstep.strategies.fsdp import FSDP


class Tensor(Single):
    """Layers that are understood are split over the ranks of a replica; replicas average gradients, or shard all."""

    def __init__(self) -> None:
        self._fsdp: FSDP | None = None
        """One for all models."""

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        if world.size == 1:
            return super().wrap(model, world)
        model.to(world.device)
        with torch.no_grad():
            send_from_rank_0([tensor.data for tensor in (*model.parameters(), *model.buffers())])
        if (world.num_shards or 1) > 1:
            return self._sharded(model, world, sample)
        leave_default_stream(world.device)
        notes = self._split(model, world, sample)[0] if world.ranks_per_replica > 1 else []
        return TensorModel(model, world, notes)

    def _split(self, model: nn.Module, world: World, sample: Sample | None) -> tuple[list[str], list[str]]:
        """What to log, and the names of whole parameters whose gradients the ranks of a replica sum."""
        plan, ranks = plan_of(model, world, sample), ReplicaRanks(world)
        total = sum(weight.numel() for weight in model.parameters())
        split_layers(model, plan, ranks)
        alone = [f"{name}.{own}" for name in plan.alone for own, _ in model.get_submodule(name).named_parameters()]
        return _described(model, plan, total, world.ranks_per_replica), alone

    def _sharded(self, model: nn.Module, world: World, sample: Sample | None) -> DistributedModel:
        """The split model, of which replicas hold shards."""
        from evenstep.strategies.fsdp import FSDP, refuse_unshardable, units_apart

        refuse_unshardable(model)
        self._fsdp = self._fsdp or FSDP()
        # The units are chosen while the model is whole: a sample of it sends nothing.
        found = units_apart(model, world, sample)
        notes, alone = self._split(model, world, sample) if world.ranks_per_replica > 1 else ([], [])
        parts = slices_of(model)
        sharded = self._fsdp.shard_units(model, world, found, bring=lambda unit: None)
        note_sharded(model, parts)
        if alone:
            sharded.after_gradients(SummedGradients(model, alone, ReplicaRanks(world)))
        notes.append(f"tensor: what each rank holds is sharded over {world.num_shards} replicas")
        sharded.notes[:0] = notes
        return sharded

    def keep_part(self, model: nn.Module, world: World, rank: int, sample: Sample) -> None:
        own = World(rank, world.ranks_per_replica, world.devices, communication=Communication(is_off=True))
        vars(own)["model_ranks"] = own
        split_layers(model, plan_of(model, world, sample), ReplicaRanks(own))


def split_layers(model: nn.Module, plan: SplitPlan, ranks: ReplicaRanks) -> None:
    """Replace the layers that the plan names by this rank's part of them."""
    if not plan.pairs and not plan.attentions:
        shown = "".join(f"\n{name}: {why}" for name, why in list(plan.whole.items())[:3])
        raise TaskError(
            "tensor finds nothing to split in this model: it splits pairs of Linears with an activation between them, "
            f"nn.MultiheadAttention, and models with a _tp_plan; use fsdp, or ddp{shown}"
        )
    for sources, target in plan.pairs:
        for source in sources:
            split_outputs(_linear(model, source), ranks)
        split_inputs(_linear(model, target), ranks)
    for name, source in plan.dropouts.items():
        part, layer = slice_of(_linear(model, source).weight), model.get_submodule(name)
        assert isinstance(part, ParameterSlice)
        assert isinstance(layer, nn.Dropout)
        split_dropout(layer, part, ranks)
    for name in plan.attentions:
        attention = model.get_submodule(name)
        assert isinstance(attention, nn.MultiheadAttention)
        split_attention(attention, ranks)
        # torch's kernels for evaluation read the weights of whole layers, around forward.
        torch.backends.mha.set_fastpath_enabled(False)
    for name in plan.alone:
        for weight in model.get_submodule(name).parameters():
            weight.register_hook(ranks.sum)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


MOST_NAMES = 6


def _described(model: nn.Module, plan: SplitPlan, total: int, num: int) -> list[str]:
    """What was split, and what stayed whole."""
    split = [*(f"{'+'.join(sources)} -> {target}" for sources, target in plan.pairs), *plan.attentions]
    parts = slices_of(model).values()
    share = sum(_size(part) for part in parts) / total
    lines = [f"tensor: {share:.0%} of the parameters are split over {num} ranks: {_few(split)}"]
    if plan.whole:
        name, why = next(iter(plan.whole.items()))
        lines.append(f"tensor: these layers stay whole on each rank: {_few(list(plan.whole))} ({name}: {why})")
    return lines


def _size(part: PartOfParameter) -> int:
    return torch.Size(part.shape).numel()


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


class SummedGradients:
    """Called after backward: sums what each rank of a replica has of some gradients, which are sharded.

    Hooks of parameters, which do this where nothing is sharded, are not those of the gathered copies.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], ranks: ReplicaRanks) -> None:
        self._weights: list[Any] = [model.get_parameter(name) for name in names]
        self._ranks = ranks

    def __call__(self) -> None:
        for weight in self._weights:
            if weight.grad is not None:
                own = weight.grad.to_local()
                own.copy_(self._ranks.sum(own))


class GroupChannel:
    """Averages tensors over the ranks that hold the same part of other replicas, in one collective."""

    def __init__(self, ranks: World) -> None:
        self._ranks = ranks

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """In place; all tensors have one type."""
        # Flags, which are averaged with gradients, are on the host.
        flat = torch.cat([tensor.detach().reshape(-1).to(self._ranks.device) for tensor in tensors])
        self._ranks.heartbeat.collective()
        dist.all_reduce(flat, group=self._ranks.group)
        flat /= self._ranks.size
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


class TensorModel(DistributedModel):
    """A replica whose layers are split over ranks; gradients are averaged over replicas after backward."""

    def __init__(self, model: nn.Module, world: World, notes: list[str]) -> None:
        super().__init__(model, [LossModule(model)])
        self._world = world
        self._averaging = self._made()
        self.notes = [*notes, *self.notes]

    def _made(self) -> Averaging | None:
        ranks = self._world.data_ranks
        return (
            Averaging(GroupChannel(ranks), self.module, self._world)
            if ranks.size > 1 and trained(self.module)
            else None
        )

    def sync_replicas(self, is_training: bool) -> None:
        if not is_training:
            send_buffers(self)
        elif self.has_buffers:
            send_buffers(self, self._world)

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        if self._averaging is None:
            return super().sync_gradients(is_last)
        return self._averaging if is_last else NOTHING

    def follow_requires_grad(self) -> None:
        self._averaging = self._made()
