"""The first batches, compared across ranks: nobody may have read what another one read, or other data altogether."""

from __future__ import annotations

from typing import Any

from evenstep.errors import TaskError
from evenstep.worker.loader import Batch
from evenstep.worker.world import World


def check_apart(world: World, batch: Batch) -> None:
    """Raise TaskError, on every rank, if the ranks read the same samples, or hold different data; all ranks call it."""
    if batch.digests is None:
        return
    ids = [piece.ids[:2].tolist() for piece in batch.micro_batches[0]]
    told = world.gather({"seats": batch.digests[:-1], "common": batch.digests[-1], "ids": ids, "span": len(batch.span)})
    _refuse_other_data(told, is_stream=batch.loader.num_samples is None)
    _refuse_same_data(told)


def _refuse_other_data(told: list[dict[str, Any]], is_stream: bool) -> None:
    for rank, other in enumerate(told):
        if (other["common"], other["span"]) == (told[0]["common"], told[0]["span"]) or not other["common"]:
            continue
        if is_stream:
            raise TaskError(
                f"rank {rank} read another stream than rank 0: each rank goes through the whole stream and keeps its "
                "share.\nLet the dataset give everything, in the same order, to every rank: no sharing out by rank in "
                "it, and no draws that are not torch's, NumPy's or Python's own"
            )
        raise TaskError(
            f"rank {rank} has other data than rank 0: the same sample differs between them.\n"
            "Were files listed in another order (sort them), or was a split drawn without a seed? In a loop of your "
            "own, data that is meant to differ goes with team.loader(..., compare=False)"
        )


def _refuse_same_data(told: list[dict[str, Any]]) -> None:
    seen: dict[str, tuple[int, list[int]]] = {}
    for rank, other in enumerate(told):
        for digest, ids in zip(other["seats"], other["ids"], strict=True):
            if digest and digest in seen:
                first, first_ids = seen[digest]
                raise TaskError(
                    f"ranks {first} and {rank} read the same data for different samples ({first_ids} and {ids}).\n"
                    "Does the dataset use the index that it is given? One that draws or iterates by itself gives every "
                    "rank the same; an IterableDataset is shared out rightly"
                )
            if digest:
                seen[digest] = (rank, ids)
