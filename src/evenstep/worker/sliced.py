"""A fused update of a small network, spread over the whole card.

torch's fused kernels give each block of a card 65,536 numbers of a tensor: a small network is the work of a few blocks,
and most of the card looks on. Cut into slices, it is many blocks' work, with the same arithmetic for every number. A
launch takes 30 tensors or more, so slices cost nothing up to there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenstep.worker.gradients import fills_memory

MOST = 30
"""Tensors of a launch, at least: of five lists (amsgrad), and more where there are fewer."""
BLOCK = 65536
LEAST = 1024
"""Numbers of a slice; a multiple of it, so that slices are read as widely as whole tensors are."""
_KERNELS = tuple(getattr(torch.ops.aten, name) for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_"))


class Sliced(TorchDispatchMode):
    """Inside, fused updates get slices of large weights."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*(cut(args) if func.overloadpacket in _KERNELS else args), **(kwargs or {}))


def slice_length(sizes: list[int]) -> int:
    """Numbers of a slice, for tensors of these sizes: as few as one launch allows; 0 if that is enough for the card as
    it is, or too much for one launch.

    >>> slice_length([784 * 256, 256, 2560, 10]), slice_length([100] * 5), slice_length([10**8])
    (8192, 1024, 0)
    """
    if not sizes or len(sizes) > MOST or sum(sizes) >= MOST * BLOCK:
        return 0
    length = LEAST
    while sum(math.ceil(size / length) for size in sizes) > MOST:
        length += LEAST
    return length


def cut(lists: tuple[list[torch.Tensor], ...]) -> tuple[list[torch.Tensor], ...]:
    """The lists of a fused update (weights, gradients, averages, counts of steps), with slices in place of tensors."""
    weights = lists[0]
    length = slice_length([weight.numel() for weight in weights])
    if not length:
        return lists
    found: tuple[list[torch.Tensor], ...] = tuple([] for _ in lists)
    for place, weight in enumerate(weights):
        given = [one[place] if one else None for one in lists]
        is_cut = weight.numel() > length and all(_lies_like(tensor, weight) for tensor in given)
        for out, tensor in zip(found, given, strict=True):
            if tensor is None:
                continue
            if not is_cut:
                out.append(tensor)
            elif tensor.numel() == 1:
                out += [tensor] * math.ceil(weight.numel() / length)
            else:
                out += tensor.as_strided((weight.numel(),), (1,)).split(length)
    return found


def _lies_like(tensor: torch.Tensor | None, weight: torch.Tensor) -> bool:
    """Whether its numbers lie in memory as those of the weight do, without gaps; a list may be empty, and a step counts
    for all of its weight."""
    if tensor is None or tensor.numel() == 1:
        return True
    return tensor.stride() == weight.stride() and tensor.shape == weight.shape and fills_memory(weight)
