"""Layers of which each rank computes a part: they replace the class of a layer in place, so that names stay.

A pair of Linears is split as in Megatron-LM: the first by its outputs, the second by its inputs. What is between them
is computed number by number, so that each rank has the right part of it; the partial results of the second are summed,
and its bias is added once. In backward, the gradients of the first one's input are summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from evenstep.distributed.parameter_slices import ParameterSlice, cut_parameter, slice_of
from evenstep.distributed.world import World


class ReplicaRanks:
    """The ranks that compute one replica together, and their sums."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ranks = world.model_ranks

    def __deepcopy__(self, memo: object) -> ReplicaRanks:
        # A process group cannot be copied, and a copy of a layer computes with the same ranks.
        return self

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over these ranks, in a tensor of its own."""
        total = values.clone(memory_format=torch.contiguous_format)
        if not self.world.communication.is_off:
            self.world.heartbeat.collective()
            arrived = self.world.spans.send("activations", [total], waits=True)
            dist.all_reduce(total, group=self.ranks.group)
            arrived()
        return total


class SharedInput(torch.autograd.Function):
    """The same values on all ranks, each of which computes a part with them: their gradients are summed."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, ranks: ReplicaRanks) -> torch.Tensor:
        context.ranks = ranks
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return SummedParts.apply(gradient, context.ranks), None  # type: ignore[no-untyped-call]


class SummedParts(torch.autograd.Function):
    """The sum of what all ranks computed; its gradient is that of every part."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, ranks: ReplicaRanks) -> torch.Tensor:
        context.ranks = ranks
        return ranks.sum(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return SharedInput.apply(gradient, context.ranks), None  # type: ignore[no-untyped-call]


def shared(values: torch.Tensor, ranks: ReplicaRanks) -> torch.Tensor:
    found: torch.Tensor = SharedInput.apply(values, ranks)  # type: ignore[no-untyped-call]
    return found


def summed(values: torch.Tensor, ranks: ReplicaRanks) -> torch.Tensor:
    found: torch.Tensor = SummedParts.apply(values, ranks)  # type: ignore[no-untyped-call]
    return found


class ColumnLinear(nn.Linear):
    """A Linear of which each rank computes some outputs."""

    evenstep_ranks: ReplicaRanks

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(shared(input, self.evenstep_ranks), self.weight, self.bias)


class RowLinear(nn.Linear):
    """A Linear to which each rank brings some inputs; the bias is added once, to the sum."""

    evenstep_ranks: ReplicaRanks

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        total = summed(F.linear(input, self.weight), self.evenstep_ranks)
        return total if self.bias is None else total + self.bias.to(total.dtype)


def split_outputs(layer: nn.Linear, ranks: ReplicaRanks, unit: int = 1) -> None:
    """Let each rank compute some of its outputs."""
    _cut_rows(layer, ("weight", "bias"), ranks, unit)
    layer.out_features = len(layer.weight)
    _become(layer, ColumnLinear, ranks)


def split_inputs(layer: nn.Linear, ranks: ReplicaRanks, unit: int = 1) -> None:
    """Let each rank bring some of its inputs."""
    cut_parameter(layer, "weight", ParameterSlice(ranks.ranks, tuple(layer.weight.shape), 1, unit))
    layer.in_features = layer.weight.shape[1]
    _become(layer, RowLinear, ranks)


def _cut_rows(layer: nn.Module, names: Iterable[str], ranks: ReplicaRanks, unit: int, blocks: int = 1) -> None:
    """Keep this rank's rows of each of these parameters that the layer has."""
    for name in names:
        weight = getattr(layer, name)
        if weight is not None:
            cut_parameter(layer, name, ParameterSlice(ranks.ranks, tuple(weight.shape), 0, unit, blocks))


def _become(layer: nn.Module, kind: type[nn.Module], ranks: ReplicaRanks) -> None:
    layer.__class__ = kind
    vars(layer)["evenstep_ranks"] = ranks


class PartDropout(nn.Dropout):
    """Dropout of what one rank computes of a wider tensor: the part of the mask that one device would draw."""

    evenstep_ranks: ReplicaRanks
    evenstep_own: ParameterSlice

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input
        own, width = self.evenstep_own.own, self.evenstep_own.shape[0]
        return input * part_of_mask(input, self.p, -1, own, width)


def part_of_mask(like: torch.Tensor, p: float, dim: int, own: range, width: int) -> torch.Tensor:
    """What dropout multiplies by; drawn for the whole width, on all ranks the same."""
    shape = list(like.shape)
    shape[dim] = width
    # In the order in which numbers lie in memory: that is the order in which torch draws them.
    order = sorted(range(like.ndim), key=lambda one: -like.stride()[one])
    ones = like.new_ones([shape[one] for one in order]).permute([order.index(one) for one in range(like.ndim)])
    return F.dropout(ones, p).narrow(dim, own.start, len(own))


def split_dropout(layer: nn.Dropout, own: ParameterSlice, ranks: ReplicaRanks) -> None:
    """Let it draw masks for what a rank has of a wider tensor."""
    _become(layer, PartDropout, ranks)
    vars(layer)["evenstep_own"] = own


class PartAttention(nn.MultiheadAttention):
    """Multi-head attention of which each rank computes some heads."""

    evenstep_ranks: ReplicaRanks
    evenstep_heads: tuple[range, int]
    """The heads of this rank, and the number of all."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (one.unsqueeze(0) for one in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (one.transpose(0, 1) for one in (query, key, value))
        queries, keys, values = self._projected(query, key, value)
        mask = self._mask(queries, keys, key_padding_mask, attn_mask)
        out, weights = self._attend(queries, keys, values, mask, need_weights)
        # Queries first, as torch's own lies in memory: dropout behind it draws in that order.
        out = self.out_proj(out.permute(2, 0, 1, 3).flatten(2)).transpose(0, 1)
        if weights is not None:
            weights = self._of_all_heads(weights, average_attn_weights)
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _projected(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """[batch, own heads, length, width of a head] of queries, keys and values."""
        assert self.in_proj_weight is not None
        weights = self.in_proj_weight.chunk(3)
        biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None,) * 3
        # Once for all three, where they are one tensor: one sum in backward.
        given = {id(one): shared(one, self.evenstep_ranks) for one in inputs}
        projected = [
            F.linear(given[id(one)], weight, bias) for one, weight, bias in zip(inputs, weights, biases, strict=True)
        ]
        return [one.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for one in projected]

    def _mask(
        self, queries: torch.Tensor, keys: torch.Tensor, padding: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What is added to the scores of this rank's heads."""
        heads, num_heads = self.evenstep_heads
        mask = _added(mask, queries.dtype)
        padding = _added(padding, queries.dtype)
        if mask is not None and mask.dim() == 3:
            every = mask.view(len(queries), num_heads, queries.shape[2], keys.shape[2])
            mask = every[:, heads.start : heads.stop]
        if padding is not None:
            of_keys = padding[:, None, None, :]
            mask = of_keys if mask is None else mask + of_keys
        return mask

    def _attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        need_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not need_weights and not (self.training and self.dropout):
            return F.scaled_dot_product_attention(queries, keys, values, mask), None
        scores = queries @ keys.transpose(-2, -1) * self.head_dim**-0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if self.training and self.dropout:
            heads, num_heads = self.evenstep_heads
            weights = weights * part_of_mask(weights, self.dropout, 1, heads, num_heads)
        return weights @ values, weights if need_weights else None

    def _of_all_heads(self, weights: torch.Tensor, is_mean: bool) -> torch.Tensor:
        heads, num_heads = self.evenstep_heads
        before, after = heads.start, num_heads - heads.stop
        every = summed(F.pad(weights, (0, 0, 0, 0, before, after)), self.evenstep_ranks)
        return every.mean(1) if is_mean else every


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as what is added to scores: True is what is left out."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))


def split_attention(layer: nn.MultiheadAttention, ranks: ReplicaRanks) -> None:
    """Let each rank compute some of its heads."""
    num_heads = layer.num_heads
    assert layer.in_proj_weight is not None
    _cut_rows(layer, ("in_proj_weight", "in_proj_bias"), ranks, layer.head_dim, blocks=3)
    out = layer.out_proj
    split_inputs(out, ranks, unit=layer.head_dim)
    part = slice_of(out.weight)
    assert isinstance(part, ParameterSlice)
    heads = range(part.own.start // layer.head_dim, part.own.stop // layer.head_dim)
    layer.num_heads = len(heads)
    vars(layer)["evenstep_heads"] = (heads, num_heads)
    _become(layer, PartAttention, ranks)
