"""Which rows of a sharded tensor this rank holds. DTensor is not imported for what is not sharded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


def own_rows(tensor: Any) -> OwnRows | None:
    """What this rank holds of it; None for what is not sharded."""
    if not is_sharded(tensor):
        return None
    from evenstep.internals import global_offset

    mesh = tensor.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    is_range = all(
        one.is_replicate() or (one.is_shard(0) and type(one).__name__ == "Shard") for one in tensor.placements
    )
    is_first = all(place == 0 for one, place in zip(tensor.placements, coordinate, strict=True) if one.is_replicate())
    start = global_offset(tensor.shape, mesh, tensor.placements)[0] if is_range and tensor.ndim else 0
    return OwnRows(tensor.to_local(), start, is_range, is_first)


def gathered(tensor: Any) -> torch.Tensor:
    """The whole tensor; all ranks that hold a part call this."""
    found: torch.Tensor = tensor.full_tensor()
    return found


def with_rows(values: torch.Tensor, target: DTensor) -> DTensor:
    """A sharded tensor like `target`, of which this rank holds these rows."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values.to(target.device),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )
