"""Parameters of which each rank of a replica holds a slice, or one rank holds all: how they become whole again.

What a rank holds is a plain tensor, so that optimizers, fused kernels and gradients know nothing of it; what it is a
part of is kept as an attribute of the parameter. Of a parameter on another rank, a rank has an empty one on the meta
device, with the same name and shape.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from evenstep.distributed.world import World

_ATTRIBUTE = "evenstep_slice"
_BUFFERS = "evenstep_buffers"


class PartOfParameter(Protocol):
    """Where the numbers of a parameter or buffer are, of which this rank has a part, or none."""

    @property
    def ranks(self) -> World:
        """Those of the replica."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """What this rank holds of the whole."""

    def join(self, local: torch.Tensor) -> torch.Tensor:
        """The whole, on all ranks of the replica, which call this together."""

    def state(self, own: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
        """What belongs to a parameter of this shape here (gradient, optimizer state), for the whole one; together."""


def cuts(num: int, parts: int, unit: int = 1) -> list[range]:
    """`num` numbers in `parts` consecutive ranges, cut at multiples of `unit`; the first ones may be longer.

    >>> cuts(10, 4), cuts(12, 2, unit=4)
    ([range(0, 3), range(3, 6), range(6, 8), range(8, 10)], [range(0, 8), range(8, 12)])
    """
    units = num // unit
    ends = [unit * (part * (units // parts) + min(part, units % parts)) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


@dataclass(frozen=True)
class ParameterSlice:
    """How a parameter is cut over the ranks of a replica."""

    ranks: World
    """The ranks of the replica."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int
    unit: int = 1
    """Rows or columns that stay together, such as those of an attention head."""
    blocks: int = 1
    """Parts that are cut one by one: the rows for queries, keys and values of one packed weight."""

    @property
    def own(self) -> range:
        """The rows or columns of this rank, in each block."""
        return self._cuts[self.ranks.rank]

    @property
    def _cuts(self) -> list[range]:
        return cuts(self.shape[self.dim] // self.blocks, self.ranks.size, self.unit)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the whole."""
        parts = [block.narrow(self.dim, self.own.start, len(self.own)) for block in whole.chunk(self.blocks, self.dim)]
        return torch.cat(parts, self.dim).contiguous()

    def join(self, local: torch.Tensor) -> torch.Tensor:
        """The whole, from the slices of all ranks, which call this together."""
        lengths = [len(one) * self.blocks for one in self._cuts]
        rows = local.detach().movedim(self.dim, 0)
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
        # As bytes: gloo has no collective for every type.
        sent = padded.contiguous().flatten().view(torch.uint8)
        every = [torch.empty_like(sent) for _ in lengths]
        self.ranks.heartbeat.collective()
        dist.all_gather(every, sent, group=self.ranks.group)
        found = [
            one.view(rows.dtype).view_as(padded)[:length].chunk(self.blocks)
            for one, length in zip(every, lengths, strict=True)
        ]
        every_block = torch.cat([torch.cat(of_block) for of_block in zip(*found, strict=True)])
        return every_block.movedim(0, self.dim).contiguous()

    def state(self, own: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
        """Tensors of the slice's shape, joined."""
        return {
            key: self.join(one) if isinstance(one, torch.Tensor) and one.ndim and one.shape == shape else one
            for key, one in own.items()
        }


@dataclass(frozen=True)
class ShardedSlice:
    """A slice that is itself sharded, by rows, over the ranks that have the same one of other replicas."""

    part: PartOfParameter
    mesh: Any
    placements: Any

    @property
    def ranks(self) -> World:
        return self.part.ranks

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of its slice, sharded as the parameter is."""
        from torch.distributed.tensor import distribute_tensor

        own = self.part.take(whole).to(self.ranks.device)
        return distribute_tensor(own, self.mesh, self.placements, src_data_rank=None)

    def join(self, local: Any) -> torch.Tensor:
        """The whole: first the slice, then all of them."""
        return self.part.join(local.detach().full_tensor())

    def state(self, own: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
        """Tensors of the slice's shape, joined."""
        return {
            key: self.join(one) if isinstance(one, torch.Tensor) and one.ndim and one.shape == shape else one
            for key, one in own.items()
        }


@dataclass(frozen=True)
class OnStage:
    """A parameter or buffer that one rank of a pipeline holds."""

    ranks: World
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    """The rank that holds it, among those of the replica."""

    @property
    def is_here(self) -> bool:
        return self.ranks.rank == self.owner

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """All of it, or nothing."""
        return whole if self.is_here else torch.empty(self.shape, dtype=self.dtype, device="meta")

    def join(self, local: torch.Tensor) -> torch.Tensor:
        """A copy on every rank."""
        found: dict[str, torch.Tensor] = self._sent({"": local.detach().cpu()} if self.is_here else {})
        return found[""]

    def state(self, own: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
        """What its owner has of it."""
        here = own if self.is_here else {}
        return self._sent(
            {key: one.detach().cpu() if isinstance(one, torch.Tensor) else one for key, one in here.items()}
        )

    def _sent(self, values: dict[str, Any]) -> dict[str, Any]:
        buffer = io.BytesIO()
        # Copies: of a view, the tensor that it is a view of would be written.
        torch.save({key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in values.items()}, buffer)
        lengths = self.ranks.gather(len(buffer.getvalue()) if self.is_here else 0)
        sent = torch.zeros(lengths[self.owner], dtype=torch.uint8)
        if self.is_here:
            sent = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        dist.broadcast(sent, group=self.ranks.group, group_src=self.owner)
        if self.is_here:
            return values
        found: dict[str, Any] = torch.load(io.BytesIO(sent.numpy().tobytes()), weights_only=True)
        return found


def is_slice(tensor: torch.Tensor) -> bool:
    """Whether each rank of a replica has some numbers of it."""
    return isinstance(slice_of(tensor), ParameterSlice | ShardedSlice)


def slice_of(tensor: torch.Tensor) -> PartOfParameter | None:
    """What a parameter is a part of; None for one that every rank has."""
    found: PartOfParameter | None = getattr(tensor, _ATTRIBUTE, None)
    return found


def slices_of(module: nn.Module) -> dict[str, PartOfParameter]:
    """The parameters and buffers of a model that this rank has a part of, by all their names."""
    named = module.named_parameters(remove_duplicate=False)
    buffers: dict[str, PartOfParameter] = vars(module).get(_BUFFERS, {})
    return {**buffers, **{name: part for name, weight in named if (part := slice_of(weight)) is not None}}


def place(module: nn.Module, name: str, part: OnStage) -> nn.Parameter:
    """Keep a parameter, given by its name in the model, on its stage alone; returns what this rank has of it."""
    prefix, _, last = name.rpartition(".")
    owner = module.get_submodule(prefix)
    weight: nn.Parameter = getattr(owner, last)
    if not part.is_here:
        weight = nn.Parameter(part.take(weight.detach()), weight.requires_grad)
        setattr(owner, last, weight)
    setattr(weight, _ATTRIBUTE, part)
    return weight


def place_buffer(module: nn.Module, name: str, part: OnStage) -> None:
    """Remember on which stage a buffer is kept up to date."""
    vars(module).setdefault(_BUFFERS, {})[name] = part


def cut_parameter(module: nn.Module, name: str, part: ParameterSlice) -> None:
    """Keep this rank's slice of a parameter, and free the rest."""
    weight: nn.Parameter = getattr(module, name)
    kept = nn.Parameter(part.take(weight.detach()), weight.requires_grad)
    setattr(kept, _ATTRIBUTE, part)
    setattr(module, name, kept)


def note_sharded(module: nn.Module, parts: Mapping[str, PartOfParameter]) -> None:
    """Remember what sharded parameters are parts of; `parts` are those of before, which sharding has replaced."""
    for name, weight in module.named_parameters(remove_duplicate=False):
        if name in parts:
            sharded: Any = weight
            setattr(weight, _ATTRIBUTE, ShardedSlice(parts[name], sharded.device_mesh, sharded.placements))


def whole_state(weight: torch.Tensor, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """A gradient, or optimizer state, of a weight, as it is for the whole weight; its ranks call this together."""
    part = slice_of(weight)
    return own if part is None else part.state(own, weight.shape)


def joined(weight: torch.Tensor) -> torch.Tensor:
    """The whole of a weight; its ranks call this together."""
    part = slice_of(weight)
    return weight if part is None else part.join(weight)
