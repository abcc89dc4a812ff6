"""Fused updates of shards that have the bits of an update of the whole parameter, on the CPU.

torch's kernel computes with vectors, and what is left at the end of a tensor in another way, which is rounded
differently. So a shard is updated in slices: whole vectors, and the rest inside a small tensor in which its numbers lie
as they do in the whole parameter. On a GPU every number is computed in one way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from evenstep.checkpoint.shards import is_sharded
from evenstep.private_apis import TorchDispatchMode

VECTOR_BYTES = {"AVX512": 64, "AVX2": 32}
"""By the kind of CPU for which torch chooses its kernels."""
_KERNELS = tuple(getattr(torch.ops.aten, name) for name in ("_fused_adam_", "_fused_adamw_"))


def vector_bytes() -> int | None:
    """Bytes that the kernel computes at once; None where that is not known."""
    return VECTOR_BYTES.get(torch.backends.cpu.get_cpu_capability())


class Slice(NamedTuple):
    """A part of a shard, and a tensor of `size` numbers that it is updated in, from `at` on; 0: where it lies."""

    start: int
    stop: int
    at: int = 0
    size: int = 0


def slices(offset: int, num: int, whole: int, width: int) -> list[Slice]:
    """How to update `num` numbers of a shard that begins at `offset` of a tensor of `whole` numbers.

    >>> slices(10, 10, 20, 8)
    [Slice(start=0, stop=6, at=0, size=8), Slice(start=6, stop=10, at=0, size=4)]
    >>> slices(18, 2, 20, 8)
    [Slice(start=0, stop=2, at=2, size=4)]
    """
    end = max(0, min(num, whole - whole % width - offset))
    full = end - end % width
    found = [
        Slice(0, full),
        Slice(full, end, 0, width),
        Slice(end, num, end + offset - whole + whole % width, whole % width),
    ]
    return [part for part in found if part.stop > part.start]


class ShardedUpdates(TorchDispatchMode):
    """Inside, fused updates of shards on the CPU are those of whole parameters."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket not in _KERNELS or not any(map(is_sharded, args[0])):
            return func(*args, **(kwargs or {}))
        bytes_at_once = vector_bytes()
        assert bytes_at_once is not None
        for place, weight in enumerate(args[0]):
            tensors = [_local(one[place]) if one else None for one in args]
            width = bytes_at_once // weight.dtype.itemsize
            for part in slices(_offset(weight), weight.to_local().numel(), weight.numel(), width):
                _update(func, tensors, part, kwargs or {})
        return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def _offset(weight: Any) -> int:
    """Where the rows of this rank begin; what has no dimensions is whole on every rank."""
    if not weight.ndim:
        return 0
    rows = -(-len(weight) // weight.device_mesh.size())
    first: int = min(len(weight), rows * weight.device_mesh.get_local_rank())
    return first * int(weight.numel() // max(1, len(weight)))


def _update(func: Any, tensors: list[torch.Tensor | None], part: Slice, options: dict[str, Any]) -> None:
    """Update a part of the weight, its gradient and its state; the step is a number for all of them."""
    *large, step = tensors
    flat = [one.view(-1)[part.start : part.stop] if one is not None else None for one in large]
    if not part.size:
        func(*([one] if one is not None else [] for one in flat), [step], **options)
        return
    inside = slice(part.at, part.at + part.stop - part.start)
    padded = [one.new_ones(part.size) if one is not None else None for one in flat]
    for target, source in zip(padded, flat, strict=True):
        if target is not None and source is not None:
            target[inside] = source
    func(*([one] if one is not None else [] for one in padded), [step], **options)
    for target, source in zip(padded, flat, strict=True):
        if target is not None and source is not None:
            source.copy_(target[inside])
