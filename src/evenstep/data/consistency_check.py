"""Ranks compare digests of the first batches: the same data on all ranks, and different samples on each."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenstep.data.nested import leaves
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.sampling.order import Order, order_name

if TYPE_CHECKING:
    from evenstep.data.batches import HostMicroBatch
    from evenstep.data.loader import Batch

MAX_HASHED_BYTES = 1 << 20
"""Bytes of each tensor that go into a digest."""
_IF_INTENDED = "In a custom loop, use team.loader(..., mine=True) for data that differs between ranks on purpose"


@dataclass(frozen=True)
class BatchDigests:
    """Digests of what was read, which the ranks compare; "" where nothing can be compared."""

    replicas: list[str]
    """One digest per replica of this process."""
    common: str
    """Of a sample that should be equal on every rank."""
    ids: str
    """Of the ids of the global batch."""


def replica_digests(micro_batches: list[list[HostMicroBatch]]) -> list[str]:
    """For each replica, a digest of what it read; "" if it has no samples, or if all are equal."""
    replicas = [
        [micro_batch.data for micro_batch in per_replica if len(micro_batch.ids)]
        for per_replica in zip(*micro_batches, strict=True)
    ]
    return [digest(data) if any(map(is_varied, data)) else "" for data in replicas]


def digest(data: Any) -> str:
    """A digest of nested tensors, arrays, numbers and strings; "" if there is anything else."""
    content = hashlib.blake2b(digest_size=8)
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            flat = leaf.detach().cpu().contiguous().reshape(-1)[: MAX_HASHED_BYTES // leaf.element_size()]
            content.update(flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"")
        elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != object:
            content.update(np.ascontiguousarray(leaf).tobytes()[:MAX_HASHED_BYTES])
        elif leaf is None or isinstance(leaf, str | bytes | int | float):
            content.update(repr(leaf).encode())
        else:
            return ""
    return content.hexdigest()


def is_varied(data: Any) -> bool:
    """Whether samples of a batch differ; equal ones do not show which rank read which."""
    for leaf in leaves(data):
        is_tensor = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        if is_tensor and leaf.ndim and len(leaf) > 1 and bool((leaf[1:] != leaf[:1]).any()):
            return True
    return False


def check_consistent(world: World, batch: Batch) -> None:
    """Raise TaskError, on every rank, if ranks read the same samples, different data, or a different order.

    All ranks call this together.
    """
    if batch.checked is None:
        return
    loader = batch.loader
    loader.compared()
    first_ids = [micro_batch.ids[:2].tolist() for micro_batch in batch.micro_batches[0]]
    order = [order_name(loader.order), loader.num_samples, batch.checked.ids, len(batch.span)]
    gathered = world.gather({**asdict(batch.checked), "first_ids": first_ids, "order": order})
    is_stream = loader.order is None
    for rank, other in enumerate(gathered):
        if other["order"] != gathered[0]["order"] and not is_stream:
            raise TaskError(_other_order(rank, other["order"], gathered[0]["order"]))
        # A sample that differs when it is read twice (its digest is empty) cannot be compared.
        is_known = other["common"] and gathered[0]["common"]
        if (is_known and other["common"] != gathered[0]["common"]) or other["order"] != gathered[0]["order"]:
            raise TaskError(_OTHER_STREAM.format(rank=rank) if is_stream else _OTHER_DATA.format(rank=rank))
    _refuse_same_data(gathered[:: world.ranks_per_replica], world.ranks_per_replica)


def check_equal_lengths(world: World, order: Order) -> None:
    """Raise TaskError, on every rank, if the separate data of ranks differs in length: their steps would not match."""
    gathered = world.gather([order.lengths.rest, list(order.lengths.first)])
    for rank, lengths in enumerate(gathered):
        if lengths != gathered[0]:
            num, first = (one[0] // world.data_size for one in (lengths, gathered[0]))
            raise TaskError(
                f"rank {rank} has {num} samples and rank 0 has {first}: with mine=True every rank has "
                f"an equal share of each step.\nGive all ranks the same number, such as the first {min(num, first)}"
            )


def _other_order(rank: int, order: list[Any], first: list[Any]) -> str:
    if order[1] != first[1]:
        num, num_first = order[1], first[1]
        return (
            f"rank {rank} has {num} samples and rank 0 has {num_first}: all ranks need the same data.\n{_IF_INTENDED}"
        )
    return (
        f"rank {rank} takes its samples in a different order than rank 0: the arguments of the sampler (weights, "
        "labels, difficulty)\ndiffer between them; make them the same on every rank, from a file or from a seed"
    )


_OTHER_STREAM = (
    "rank {rank} read a different stream than rank 0: each rank reads the whole stream and keeps its share.\n"
    "Let the dataset yield every sample in the same order on every rank: do not shard it by rank, and draw random "
    "numbers only from the global generators of torch, NumPy or Python"
)
_OTHER_DATA = (
    "rank {rank} has different data than rank 0: the same sample differs between them.\n"
    "Were files listed in a different order (sort them), or was a split drawn without a seed? Make random data after "
    f"evenstep.join(), which seeds all ranks alike, or seed it. {_IF_INTENDED}"
)


def _refuse_same_data(gathered: list[dict[str, Any]], ranks_per_replica: int) -> None:
    """Two ranks may read equal samples if each id always gives the same sample (`common` is known)."""
    seen: dict[str, tuple[int, list[int]]] = {}
    for number, other in enumerate(gathered):
        rank = number * ranks_per_replica
        for digest, ids in zip(other["replicas"], other["first_ids"], strict=True):
            if digest and digest in seen and not other["common"]:
                first, first_ids = seen[digest]
                raise TaskError(
                    f"ranks {first} and {rank} read the same data for different samples ({first_ids} and {ids}).\n"
                    "Does the dataset use the index it is given? One that ignores it returns the same samples on every "
                    "rank; make it an IterableDataset, which is sharded correctly"
                )
            if digest:
                seen[digest] = (rank, ids)
