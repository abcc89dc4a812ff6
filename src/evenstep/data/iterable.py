"""Iterable datasets: every reader iterates over the whole stream and keeps its share.

So the batches are those of one process, whatever the number of ranks and workers, and a sample's id is its index in the
stream. The stream must yield the same samples in every iteration; the ranks compare the first batches to detect others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from evenstep.data.augmentation import Augment, Collate, PerSample, SampleTransform
from evenstep.data.batches import BatchSplit, HostBatch, HostMicroBatch, WorkerFailure, sendable
from evenstep.data.consistency_check import BatchDigests, digest, replica_digests
from evenstep.errors import TaskError
from evenstep.private_apis import hide_worker_info
from evenstep.sampling.order import Span
from evenstep.sampling.rng import Ids, IsolatedRng, derive_seed
from evenstep.task import describe

SKIPPED_AT_ONCE = 1000


def is_stream(data: Any) -> bool:
    """Whether samples can only be iterated over, not indexed."""
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


@dataclass(frozen=True)
class StreamPart:
    """The rest of an epoch, from sample `start` on, and how it is split into batches."""

    cut: BatchSplit
    batch: int
    seed: int
    augment: Augment | None
    drop_last: bool
    epoch: int
    start: int
    num_checked: int


class Stream:
    """An iterable dataset."""

    def __init__(self, data: Iterable[Any], collate: Collate | None, what: str) -> None:
        if hasattr(data, "__next__"):
            raise TaskError(
                f"the {what} data is an iterator ({type(data).__name__}), which can be iterated over only once; "
                "give an object whose __iter__ starts again"
            )
        self._data = data
        self._collate = collate
        self._what = what
        self._reader = PerSample(self._pick, collate, can_read_again=False)
        self._held: tuple[int, list[Any]] = (0, [])
        """The id of the first sample in memory, and the samples."""

    def first(self, num: int, transform: SampleTransform) -> tuple[Any, Ids]:
        """A batch of the first few samples, and their ids."""
        samples = self._opened(0, 0).take(num)
        self._held = (0, samples)
        ids = np.arange(len(samples))
        return self._reader.make(ids, ids, transform), ids

    def _opened(self, seed: int, epoch: int) -> _Opened:
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        return _Opened(self._data, derive_seed(seed, "stream", epoch), self._what)

    def batches(self, part: StreamPart, reader: int = 0, num_readers: int = 1) -> Iterator[HostBatch]:
        """The steps of a part; of `num_readers` readers, each makes every `num_readers`th."""
        opened = self._opened(part.seed, part.epoch)
        transform = SampleTransform(part.seed, part.epoch, part.augment)
        opened.skip(part.start)
        # Read ahead: a step is the last of its epoch if no sample follows, or no whole batch.
        num_ahead = part.batch if part.drop_last else 1
        samples = opened.take(part.batch + num_ahead)
        self._check_start(part, len(samples))
        for number in count():
            samples, held = samples[: part.batch], samples[part.batch :]
            if len(samples) < num_ahead:
                return
            if number % num_readers == reader:
                start = part.start + number * part.batch
                span = Span(part.epoch, start, start + len(samples))
                micro_batches, checked = self._cut(part, samples, span, transform, number < part.num_checked)
                yield HostBatch(span, micro_batches, len(held) < num_ahead, checked)
            samples = held + opened.take(part.batch)

    def _check_start(self, part: StreamPart, num: int) -> None:
        """Raise TaskError if there is no step at all in what is left of an epoch."""
        if num == 0:
            raise TaskError(
                f"the {self._what} stream ended before sample {part.start}, from which this run resumes; "
                "it must yield as many samples as before"
            )
        if part.drop_last and num < part.batch:
            raise TaskError(
                f"the {self._what} stream has {num} samples from sample {part.start} on, and drop_last leaves nothing "
                f"of them with a global batch of {part.batch}; use --batch {num} or less"
            )

    def _cut(
        self, part: StreamPart, samples: list[Any], span: Span, transform: SampleTransform, is_checked: bool
    ) -> tuple[list[list[HostMicroBatch]], BatchDigests | None]:
        """The micro-batches of a step, and what the ranks compare of it."""
        # Before the user's code can change the samples in place.
        common = digest(samples) if is_checked else ""
        micro_batches = [
            [self._micro_batch(samples, span, own, transform) for own in replicas]
            for replicas in part.cut.ranges(len(samples))
        ]
        return micro_batches, BatchDigests(replica_digests(micro_batches), common, "") if is_checked else None

    def _micro_batch(self, samples: list[Any], span: Span, own: range, transform: SampleTransform) -> HostMicroBatch:
        ids = span.start + np.arange(own.start, own.stop)
        read = ids if len(ids) else np.array([span.start])
        self._held = (span.start, samples)
        return HostMicroBatch(self._reader.make(read, read, transform), ids, ids)

    def _pick(self, ids: list[int]) -> Iterator[Any]:
        start, samples = self._held
        return (samples[id_ - start] for id_ in ids)


class _Opened:
    """An iteration over a stream, with the same random draws on every rank, isolated from the global generators."""

    def __init__(self, data: Iterable[Any], seed: int, what: str) -> None:
        self._data = data
        self._what = what
        self._rng = IsolatedRng(seed)
        self._num_taken = 0
        self._iterator: Iterator[Any] | None = None

    def take(self, num: int) -> list[Any]:
        """The next `num` samples, or what is left."""
        taken: list[Any] = []
        try:
            with self._rng:
                if self._iterator is None:
                    self._iterator = iter(self._data)
                for sample in islice(self._iterator, num):
                    taken.append(sample)
        except (Exception, SystemExit) as error:
            failed = self._num_taken + len(taken)
            raise TaskError(f"the {self._what} stream failed at sample {failed}: {describe(error)}") from error
        self._num_taken += len(taken)
        if self._num_taken == 0:
            raise TaskError(f"the {self._what} data, a stream, is empty; it needs at least one sample")
        return taken

    def skip(self, num: int) -> None:
        """Skip samples that an earlier run has used."""
        while num > 0:
            num -= len(self.take(min(num, SKIPPED_AT_ONCE))) or num


class StreamInWorkers(IterableDataset[Any]):
    """A stream as loader workers read it: of n workers, each makes every n-th batch."""

    def __init__(self, stream: Stream, part: StreamPart) -> None:
        super().__init__()
        self._stream = stream
        self._part = part

    def __iter__(self) -> Iterator[HostBatch | WorkerFailure]:
        info = get_worker_info()
        assert info is not None
        # A dataset that shards itself by worker would yield only a shard: every worker needs all samples.
        hide_worker_info()
        try:
            for batch in self._stream.batches(self._part, info.id, info.num_workers):
                yield sendable(batch)
        except TaskError as error:
            yield WorkerFailure(str(error))
