"""Adapters for what users bring: datasets, tensors, DataLoaders and torch Samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
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

from evenstep.data.augmentation import Collate
from evenstep.data.dataset import Source, SubsetSource, open_source
from evenstep.data.iterable import Stream, is_stream
from evenstep.errors import TaskError
from evenstep.sampling import samplers
from evenstep.sampling.order import Order
from evenstep.task import Task


@dataclass(frozen=True)
class AdaptedData:
    """The user's data as a source of samples with a sampler."""

    source: Source | Stream
    sampler: samplers.Sampler
    batch: int | None = None
    """The batch size of the DataLoader, if one was given."""
    workers: int | None = None
    worker_init: Callable[[int], None] | None = None
    drop_last: bool = False
    """Whether an incomplete last global batch of an epoch is left out."""
    notes: list[str] = field(default_factory=list)
    """Settings of the DataLoader that are not used, as sentences for the user."""

    def order(self, seed: int, batch: int) -> Order | None:
        if isinstance(self.source, Stream):
            return None
        order = self.sampler.order(self.source.num_samples, seed, batch)
        return order.drop_last(batch) if self.drop_last else order

    def dropping(self, drop_last: bool) -> AdaptedData:
        """The same, without an incomplete last batch if that is asked for here."""
        return replace(self, drop_last=True) if drop_last and not self.drop_last else self


def adapt_train(task: Task) -> AdaptedData:
    """The training data of a task."""
    return adapt(task.train, task.collate, task.sampler).dropping(task.drop_last)


def validation_sets(valid: Any) -> dict[str, Any]:
    """The validation sets of a task by name; a single one has the name ''.

    A dict of tensors or arrays is one set, whose batches are dicts.
    """
    if valid is None:
        return {}
    is_named = isinstance(valid, Mapping) and bool(valid) and all(isinstance(name, str) for name in valid)
    if is_named and not any(isinstance(data, torch.Tensor | np.ndarray) for data in valid.values()):
        return dict(valid)
    return {"": valid}


def adapt_valid(task: Task) -> dict[str, AdaptedData]:
    """The validation data of a task, by name."""
    return {name: adapt(data, task.collate, what="valid") for name, data in validation_sets(task.valid).items()}


def adapt(
    data: Any, collate: Collate | None = None, sampler: Any = None, what: str = "train", *, shuffle: bool = True
) -> AdaptedData:
    """Open `data`; `sampler` and `collate` override those of a DataLoader, `shuffle` applies if there is no sampler."""
    if isinstance(data, DataLoader):
        return _from_dataloader(data, collate, sampler, what)
    if is_stream(data) and not isinstance(data, Sampler):
        if sampler is not None and not isinstance(sampler, samplers.Sequential):
            raise TaskError(f"the {what} data is a stream, which comes in its own order; leave the sampler out")
        return AdaptedData(Stream(data, collate, what), samplers.Sequential())
    if isinstance(data, Sampler):
        raise TaskError(
            f"the {what} data is a {type(data).__name__}, not a dataset; give the dataset, and pass the sampler as "
            "Task(sampler=...)"
        )
    source = open_source(data, collate, what)
    if sampler is None:
        return AdaptedData(source, samplers.Shuffled() if shuffle else samplers.Sequential())
    return AdaptedData(source, as_sampler(sampler))


def _from_dataloader(loader: DataLoader[Any], collate: Collate | None, sampler: Any, what: str) -> AdaptedData:
    notes = []
    batch, own_sampler = loader.batch_size, loader.sampler
    if loader.batch_size is None and type(loader.batch_sampler) is BatchSampler:
        batch, own_sampler = loader.batch_sampler.batch_size, loader.batch_sampler.sampler
    has_own_batches = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    if has_own_batches:
        raise TaskError(
            f"the {what} DataLoader has a custom batch_sampler ({type(loader.batch_sampler).__name__}), but evenstep "
            "forms the batches;\ngive the dataset, and a sampler of single samples: Task(sampler=...), such as "
            "evenstep.samplers.ByLength"
        )
    if batch is None:
        raise TaskError(
            f"the {what} DataLoader has batch_size=None: its dataset returns batches; let it return samples"
        )
    drop_last = bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))
    if drop_last and what == "valid":
        notes.append("the valid DataLoader's drop_last is ignored: an evaluation counts every sample")
    if sampler is None and type(own_sampler) is DistributedSampler:
        notes.append(
            f"the {what} DataLoader's DistributedSampler is not needed: each rank gets its share of the global batch, "
            f"and batch_size={batch} is the global batch of all ranks"
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
        notes=[*notes, *inner.notes],
    )


def per_rank(adopted: AdaptedData, num_ranks: int) -> AdaptedData:
    """Separate data on each rank as one data set: each rank reads its own samples, and all are used."""
    if isinstance(adopted.source, Stream):
        raise TaskError(
            "a stream that differs between ranks (mine=True) may end on one rank before the others; "
            "give each rank a list of the same length, or the same stream to all ranks"
        )
    ids = np.tile(np.arange(adopted.source.num_samples), num_ranks)
    return replace(
        adopted, source=SubsetSource(adopted.source, ids, "own"), sampler=samplers.PerRank(adopted.sampler, num_ranks)
    )


def as_sampler(given: Any) -> samplers.Sampler:
    """The evenstep sampler for a sampler of torch's, or for a custom one."""
    if callable(getattr(given, "order", None)) and not isinstance(given, Sampler):
        return given  # type: ignore[no-any-return]
    if isinstance(given, BatchSampler):
        raise TaskError("a BatchSampler was given as the sampler; give a sampler of single ids: the batch is global")
    kind = type(given)
    if kind is SequentialSampler:
        return samplers.Sequential()
    if kind is DistributedSampler:
        # Each rank already gets a share of the order.
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
