"""Compares the first batches across ranks: the same data on all, and different samples on each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from evenstep.data.loader import Batch
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.sampling.order import Order, order_name

_IF_INTENDED = "In a custom loop, use team.loader(..., compare=False) for data that differs between ranks on purpose"


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
    _refuse_same_data(gathered)


def check_equal_lengths(world: World, order: Order) -> None:
    """Raise TaskError, on every rank, if the separate data of ranks differs in length: their steps would not match."""
    gathered = world.gather([order.lengths.rest, list(order.lengths.first)])
    for rank, lengths in enumerate(gathered):
        if lengths != gathered[0]:
            num, first = (one[0] // world.size for one in (lengths, gathered[0]))
            raise TaskError(
                f"rank {rank} has {num} samples and rank 0 has {first}: with compare=False every rank has "
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
    f"Were files listed in a different order (sort them), or was a split drawn without a seed? {_IF_INTENDED}"
)


def _refuse_same_data(gathered: list[dict[str, Any]]) -> None:
    """Two ranks may read equal samples if each id always gives the same sample (`common` is known)."""
    seen: dict[str, tuple[int, list[int]]] = {}
    for rank, other in enumerate(gathered):
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
