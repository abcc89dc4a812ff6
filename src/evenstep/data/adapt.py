"""Data as users have it: a DataLoader is taken apart, a torch Sampler becomes an order of ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from evenstep.data.dataset import Collate, Source, SubsetSource, open_source
from evenstep.data.iterable import Stream, is_stream
from evenstep.errors import TaskError
from evenstep.sampling import samplers
from evenstep.sampling.order import Order


@dataclass(frozen=True)
class AdaptedData:
    """The user's data, opened."""

    source: Source | Stream
    sampler: samplers.Sampler
    batch: int | None = None
    """The DataLoader's, if it was one."""
    workers: int | None = None
    worker_init: Callable[[int], None] | None = None
    drop_last: bool = False
    """Whether the last global batch of an epoch is left out if it is short."""
    said: list[str] = field(default_factory=list)
    """What was not taken over, in plain words."""

    def order(self, seed: int, batch: int) -> Order | None:
        """The order of its ids; a stream has its own."""
        if isinstance(self.source, Stream):
            return None
        order = self.sampler.order(self.source.num_samples, seed, batch)
        return order.drop_last(batch) if self.drop_last else order


def adapt(
    data: Any, collate: Collate | None = None, sampler: Any = None, what: str = "train", *, shuffle: bool = True
) -> AdaptedData:
    """Open `data`, whatever it is: `sampler` and `collate` go before those of a DataLoader, `shuffle` after them."""
    if isinstance(data, DataLoader):
        return _taken_apart(data, collate, sampler, what)
    if is_stream(data):
        if sampler is not None and not isinstance(sampler, samplers.Sequential):
            raise TaskError(f"the {what} data is a stream, which comes in its own order; leave the sampler out")
        return AdaptedData(Stream(data, collate, what), samplers.Sequential())
    source = open_source(data, collate, what)
    if sampler is None:
        return AdaptedData(source, samplers.Shuffled() if shuffle else samplers.Sequential())
    return AdaptedData(source, as_sampler(sampler))


def _taken_apart(loader: DataLoader[Any], collate: Collate | None, sampler: Any, what: str) -> AdaptedData:
    said = []
    batch, own_sampler = loader.batch_size, loader.sampler
    if loader.batch_size is None and type(loader.batch_sampler) is BatchSampler:
        batch, own_sampler = loader.batch_sampler.batch_size, loader.batch_sampler.sampler
    own_batches = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    if own_batches:
        raise TaskError(
            f"the {what} DataLoader has a batch_sampler of its own ({type(loader.batch_sampler).__name__}), and the "
            "batch is evenstep's to cut up;\ngive the dataset, and an order of samples: Task(sampler=...), such as "
            "evenstep.samplers.ByLength"
        )
    if batch is None:
        raise TaskError(f"the {what} DataLoader has batch_size=None: its dataset makes batches; let it give samples")
    drop_last = bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))
    if drop_last and what == "valid":
        said.append("the valid DataLoader's drop_last is not followed: an evaluation counts every sample")
    if sampler is None and type(own_sampler) is DistributedSampler:
        said.append(
            f"the {what} DataLoader's DistributedSampler is not needed: each rank gets its share of a global batch, "
            f"and batch_size={batch} is that of all ranks together"
        )
    if collate is None and loader.collate_fn not in (default_collate, default_convert):
        collate = loader.collate_fn
    if sampler is None and not is_stream(loader.dataset):
        sampler = own_sampler
    inner = adapt(loader.dataset, collate, sampler, what)
    return replace(
        inner,
        batch=batch,
        workers=loader.num_workers,
        worker_init=loader.worker_init_fn,
        drop_last=drop_last and what != "valid",
        said=[*said, *inner.said],
    )


def per_rank(adopted: AdaptedData, num_ranks: int) -> AdaptedData:
    """Data that differs between ranks, as one: each reads what it has, and all of it is used."""
    if isinstance(adopted.source, Stream):
        raise TaskError(
            "a stream that differs between ranks (compare=False) may end on one before the others; "
            "give each rank a list of as many samples, or one stream to all"
        )
    ids = np.tile(np.arange(adopted.source.num_samples), num_ranks)
    return replace(
        adopted, source=SubsetSource(adopted.source, ids, "own"), sampler=samplers.PerRank(adopted.sampler, num_ranks)
    )


def as_sampler(given: Any) -> samplers.Sampler:
    """One of our samplers for one of torch's, or for one of the user's own."""
    if callable(getattr(given, "order", None)) and not isinstance(given, Sampler):
        return given  # type: ignore[no-any-return]
    if isinstance(given, BatchSampler):
        raise TaskError("a BatchSampler was given as the sampler; give one that gives single ids: the batch is global")
    kind = type(given)
    if kind is SequentialSampler:
        return samplers.Sequential()
    if kind is DistributedSampler:
        # It would share out what is shared out already; its order is ours.
        return samplers.Shuffled() if given.shuffle else samplers.Sequential()
    if kind is RandomSampler:
        return _random(given)
    if kind is SubsetRandomSampler:
        return samplers.Subset(given.indices)
    if kind is WeightedRandomSampler:
        return samplers.Weighted(given.weights, given.num_samples, given.replacement)
    if isinstance(given, Sampler) or hasattr(given, "__iter__"):
        return samplers.Custom(given)
    raise TaskError(f"the sampler is a {kind.__name__}; give one of evenstep.samplers, or a torch Sampler")


def _random(given: Any) -> samplers.Sampler:
    num = len(given.data_source)
    if given.replacement:
        return samplers.Weighted([1.0] * num, given.num_samples)
    if given.num_samples == num:
        return samplers.Shuffled()
    if given.num_samples < num:
        return samplers.Weighted([1.0] * num, given.num_samples, replacement=False)
    raise TaskError(
        f"RandomSampler(num_samples={given.num_samples}) of {num} samples gives some of them twice in an epoch; "
        "train for more epochs instead"
    )
