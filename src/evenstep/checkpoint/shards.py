"""Which rows of a sharded tensor this rank holds, and tensors that are sharded again, over any number of ranks.

DTensor is not imported for what is not sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeIs[DTensor]:
    """Whether a tensor is sharded over ranks; does not import DTensor, which only fsdp needs."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def is_any_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of them is; a quick answer where no strategy has sharded anything."""
    return "torch.distributed.tensor" in sys.modules and any(map(is_sharded, tensors))


@dataclass(frozen=True)
class OwnRows:
    """This rank's part of a sharded tensor."""

    values: torch.Tensor
    start: int
    """The number of its first row in the whole tensor."""
    is_range: bool
    """Whether it is some rows, one after the other, and not another part of the tensor."""
    is_first: bool
    """Whether no rank before this one holds the same rows."""


class RowRange(NamedTuple):
    """`OwnRows` of all tensors of one shape that are sharded alike."""

    start: int
    is_range: bool
    is_first: bool


_RANGES: WeakKeyDictionary[Any, dict[tuple[torch.Size, Any], RowRange]] = WeakKeyDictionary()
"""Of each mesh: to compute them takes as long as to write a megabyte."""


def own_rows(tensor: Any) -> OwnRows | None:
    """What this rank holds of it; None for what is not sharded."""
    if not is_sharded(tensor):
        return None
    known = _RANGES.setdefault(tensor.device_mesh, {})
    key = tensor.shape, tensor.placements
    if key not in known:
        known[key] = _row_range(*key, tensor.device_mesh)
    with torch.no_grad():
        return OwnRows(tensor.to_local(), *known[key])


def _row_range(shape: torch.Size, placements: Sequence[Any], mesh: Any) -> RowRange:
    from evenstep.private_apis import global_offset

    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    is_range = all(one.is_replicate() or (one.is_shard(0) and type(one).__name__ == "Shard") for one in placements)
    is_first = all(place == 0 for one, place in zip(placements, coordinate, strict=True) if one.is_replicate())
    # RowRange groups of ranks hold a copy each, the first group has rank 0 in it.
    is_first = is_first and int(mesh.mesh.min()) == 0
    return RowRange(global_offset(shape, mesh, placements)[0] if is_range and shape else 0, is_range, is_first)


def gathered(tensor: Any) -> torch.Tensor:
    """The whole tensor; all ranks that hold a part call this."""
    found: torch.Tensor = tensor.full_tensor()
    return found


def is_offloaded(tensor: DTensor) -> bool:
    """Whether its shards are in host memory, and those of the mesh are GPUs."""
    return tensor.device.type != tensor.device_mesh.device_type


def rows_like(tensor: torch.Tensor, target: DTensor) -> torch.Tensor:
    """A copy of the rows of a whole tensor that this rank would hold, sharded over one axis as `target` is."""
    rows = -(-len(tensor) // target.device_mesh.size())
    first = rows * target.device_mesh.get_local_rank()
    return tensor[first : first + rows].clone()


def with_rows(values: torch.Tensor, target: DTensor, shape: torch.Size | None = None) -> DTensor:
    """A sharded tensor like `target`, or of another shape, of which this rank holds these rows."""
    from torch.distributed.tensor import DTensor

    if is_offloaded(target):
        from evenstep.private_apis import tensor_of_shards

        whole = torch.empty(shape or target.shape, device="meta")
        made: DTensor = tensor_of_shards(
            values.to(target.device), target.device_mesh, target.placements, whole.shape, whole.stride()
        )
        return made
    return DTensor.from_local(
        values.to(target.device),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def sharded_like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`tensor` sharded over the devices as `target` is; every rank cuts out its own slice."""
    if not is_sharded(target):
        return tensor
    if is_offloaded(target):
        return with_rows(rows_like(tensor, target) if tensor.ndim else tensor.clone(), target, tensor.shape)
    from torch.distributed.tensor import distribute_tensor

    local = tensor.to(target.device)
    return distribute_tensor(local, target.device_mesh, target.placements, src_data_rank=None)
