"""Parameters of which each rank of a replica holds a slice: where it was cut, and how it becomes whole again.

A slice is a plain tensor, so that optimizers, fused kernels and gradients know nothing of it; what it is a slice of is
kept as an attribute of the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from evenstep.distributed.world import World

_ATTRIBUTE = "evenstep_slice"


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
        joined = torch.cat([torch.cat(of_block) for of_block in zip(*found, strict=True)])
        return joined.movedim(0, self.dim).contiguous()


def slice_of(tensor: torch.Tensor) -> ParameterSlice | None:
    """What a parameter is a slice of; None for a whole one."""
    found: ParameterSlice | None = getattr(tensor, _ATTRIBUTE, None)
    return found


def slices_of(module: nn.Module) -> dict[str, ParameterSlice]:
    """The parameters of a model that are slices, by all their names."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: part for name, weight in named if (part := slice_of(weight)) is not None}


def cut_parameter(module: nn.Module, name: str, part: ParameterSlice) -> None:
    """Keep this rank's slice of a parameter, and free the rest."""
    weight: nn.Parameter = getattr(module, name)
    kept = nn.Parameter(part.take(weight.detach()), weight.requires_grad)
    setattr(kept, _ATTRIBUTE, part)
    setattr(module, name, kept)


def joined(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A gradient, or optimizer state, of a weight, as it is for the whole weight; its ranks call this together."""
    part = slice_of(weight)
    return tensor if part is None or tensor.shape != weight.shape or not tensor.ndim else part.join(tensor)
