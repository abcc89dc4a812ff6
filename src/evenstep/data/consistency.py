"""The first batches, compared across ranks: nobody may have read what another one read, or other data altogether."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from evenstep.data.loader import Batch
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.sampling.order import Order, order_name

_MEANT = "In a loop of your own, data that is meant to differ goes with team.loader(..., compare=False)"


def check_consistent(world: World, batch: Batch) -> None:
    """Raise TaskError, on every rank, if ranks read the same samples, or other data, or in another order.

    All ranks call this together.
    """
    if batch.checked is None:
        return
    loader = batch.loader
    loader.compared()
    first_ids = [micro_batch.ids[:2].tolist() for micro_batch in batch.micro_batches[0]]
    order = [order_name(loader.order), loader.num_samples, batch.checked.ids, len(batch.span)]
    told = world.gather({**asdict(batch.checked), "first_ids": first_ids, "order": order})
    is_stream = loader.order is None
    for rank, other in enumerate(told):
        if other["order"] != told[0]["order"] and not is_stream:
            raise TaskError(_other_order(rank, other["order"], told[0]["order"]))
        # A sample that is not the same when it is read twice (its name is empty) says nothing.
        is_known = other["common"] and told[0]["common"]
        if (is_known and other["common"] != told[0]["common"]) or other["order"] != told[0]["order"]:
            raise TaskError(_OTHER_STREAM.format(rank=rank) if is_stream else _OTHER_DATA.format(rank=rank))
    _refuse_same_data(told)


def check_equal_lengths(world: World, order: Order) -> None:
    """Raise TaskError, on every rank, if data that is meant to differ does so in its number: ranks would part."""
    told = world.gather([order.lengths.rest, list(order.lengths.first)])
    for rank, lengths in enumerate(told):
        if lengths != told[0]:
            num, first = (one[0] // world.size for one in (lengths, told[0]))
            raise TaskError(
                f"rank {rank} has {num} samples of its own and rank 0 has {first}: with compare=False every rank has "
                f"an equal part in each step.\nGive all of them as many, such as the first {min(num, first)}"
            )


def _other_order(rank: int, order: list[Any], first: list[Any]) -> str:
    if order[1] != first[1]:
        return f"rank {rank} has {order[1]} samples and rank 0 has {first[1]}: all ranks need the same data.\n{_MEANT}"
    return (
        f"rank {rank} takes its samples in another order than rank 0: what the sampler was made of (weights, labels, "
        "a difficulty)\ndiffers between them; make it the same on every rank, from a file or from a seed"
    )


_OTHER_STREAM = (
    "rank {rank} read another stream than rank 0: each rank goes through the whole stream and keeps its share.\n"
    "Let the dataset give everything, in the same order, to every rank: no sharing out by rank in it, and no draws "
    "that are not torch's, NumPy's or Python's own"
)
_OTHER_DATA = (
    "rank {rank} has other data than rank 0: the same sample differs between them.\n"
    f"Were files listed in another order (sort them), or was a split drawn without a seed? {_MEANT}"
)


def _refuse_same_data(told: list[dict[str, Any]]) -> None:
    """Samples that are alike may be read by two ranks, if each id always gives the same sample (`common` is known)."""
    seen: dict[str, tuple[int, list[int]]] = {}
    for rank, other in enumerate(told):
        for digest, ids in zip(other["replicas"], other["first_ids"], strict=True):
            if digest and digest in seen and not other["common"]:
                first, first_ids = seen[digest]
                raise TaskError(
                    f"ranks {first} and {rank} read the same data for different samples ({first_ids} and {ids}).\n"
                    "Does the dataset use the index that it is given? One that draws or iterates by itself gives every "
                    "rank the same; an IterableDataset is shared out rightly"
                )
            if digest:
                seen[digest] = (rank, ids)
