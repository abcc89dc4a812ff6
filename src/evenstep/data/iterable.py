"""Iterable datasets: every reader goes through the whole stream and keeps what falls to it.

So the batches are those of one process, whatever the number of ranks and workers, and a sample's id is its place in the
stream. This is exact for a stream that gives the same samples each time it is gone through; one that does not is
noticed by the ranks' comparison of what they read, as far as the first batches show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from evenstep.data.batches import (
    BatchDigests,
    BatchSplit,
    HostBatch,
    HostMicroBatch,
    WorkerFailure,
    digest,
    replica_digests,
    sendable,
)
from evenstep.data.dataset import Augment, Collate, PerSample, SampleTransform
from evenstep.errors import TaskError
from evenstep.sampling.order import Span
from evenstep.sampling.rng import Ids, IsolatedRng, derive_seed
from evenstep.task import describe

SKIPPED_AT_ONCE = 1000


def is_stream(data: Any) -> bool:
    """Whether samples can only be had one after the other."""
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


@dataclass(frozen=True)
class StreamPart:
    """An epoch of a stream from a place on, and what is made of it."""

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
                f"the {what} data is an iterator ({type(data).__name__}), which can be gone through once; "
                "give an object whose __iter__ begins anew"
            )
        self._data = data
        self._collate = collate
        self._what = what
        self._kept = PerSample(self._pick, collate, can_read_again=False)
        self._held: tuple[int, list[Any]] = (0, [])

    def first(self, num: int, touch: SampleTransform) -> tuple[Any, Ids]:
        """A batch of the first few samples, and their ids."""
        samples = self._opened(0, 0).take(num)
        self._held = (0, samples)
        ids = np.arange(len(samples))
        return self._kept.make(ids, ids, touch), ids

    def _opened(self, seed: int, epoch: int) -> _Opened:
        """An epoch, at its start, with a first sample in it."""
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        return _Opened(self._data, derive_seed(seed, "stream", epoch), self._what)

    def batches(self, part: StreamPart, reader: int = 0, num_readers: int = 1) -> Iterator[HostBatch]:
        """The steps of a part, of which reader `reader` makes every `num_readers`th."""
        opened = self._opened(part.seed, part.epoch)
        touch = SampleTransform(part.seed, part.epoch, part.augment)
        opened.skip(part.start)
        # The last step of an epoch must know that it is the last: that no sample follows, or no whole batch.
        ahead = part.batch if part.drop_last else 1
        samples = opened.take(part.batch + ahead)
        self._check_start(part, len(samples))
        for number in count():
            samples, held = samples[: part.batch], samples[part.batch :]
            if len(samples) < (part.batch if part.drop_last else 1):
                return
            if number % num_readers == reader:
                start = part.start + number * part.batch
                span = Span(part.epoch, start, start + len(samples))
                yield self._cut(part, samples, span, touch, len(held) < ahead, number < part.num_checked)
            samples = held + opened.take(part.batch)

    def _check_start(self, part: StreamPart, num: int) -> None:
        """Raise TaskError if there is no step at all in what is left of an epoch."""
        if num == 0:
            raise TaskError(
                f"the {self._what} stream ended before place {part.start}, from where this run goes on; "
                "it must give as many samples as before"
            )
        if part.drop_last and num < part.batch:
            raise TaskError(
                f"the {self._what} stream has {num} samples from place {part.start} on, and drop_last leaves nothing "
                f"of them with a global batch of {part.batch}; use --batch {num} or less"
            )

    def _cut(
        self,
        part: StreamPart,
        samples: list[Any],
        span: Span,
        touch: SampleTransform,
        is_epoch_end: bool,
        is_checked: bool,
    ) -> HostBatch:
        # Before the user's code can change the samples in place.
        common = digest(samples) if is_checked else ""
        micro_batches = [
            [self._piece(samples, span, places, touch) for places in replicas]
            for replicas in part.cut.ranges(len(samples))
        ]
        checked = BatchDigests(replica_digests(micro_batches), common, "") if is_checked else None
        return HostBatch(span, micro_batches, is_epoch_end, checked)

    def _piece(self, samples: list[Any], span: Span, places: range, touch: SampleTransform) -> HostMicroBatch:
        ids = span.start + np.arange(places.start, places.stop)
        read = ids if len(ids) else np.array([span.start])
        self._held = (span.start, samples)
        return HostMicroBatch(self._kept.make(read, read, touch), ids, ids)

    def _pick(self, ids: list[int]) -> Iterator[Any]:
        start, samples = self._held
        return (samples[id_ - start] for id_ in ids)


class _Opened:
    """An iteration over a stream, with the same random draws on every rank, isolated from the global generators."""

    def __init__(self, data: Iterable[Any], seed: int, what: str) -> None:
        self._data = data
        self._what = what
        self._draws = IsolatedRng(seed)
        self._place = 0
        self._iterator: Iterator[Any] | None = None

    def take(self, num: int) -> list[Any]:
        """The next `num` samples, or what is left."""
        taken: list[Any] = []
        try:
            with self._draws:
                if self._iterator is None:
                    self._iterator = iter(self._data)
                for sample in islice(self._iterator, num):
                    taken.append(sample)
        except (Exception, SystemExit) as error:
            place = self._place + len(taken)
            raise TaskError(f"the {self._what} stream failed at sample {place}: {describe(error)}") from error
        self._place += len(taken)
        if self._place == 0:
            raise TaskError(f"the {self._what} data, a stream, is empty; it needs at least one sample")
        return taken

    def skip(self, num: int) -> None:
        """Go past samples that an earlier run has used."""
        while num > 0:
            num -= len(self.take(min(num, SKIPPED_AT_ONCE))) or num


class StreamInWorkers(IterableDataset[Any]):
    """A stream as loader workers read it: each makes every n-th batch, and they come back in turn."""

    def __init__(self, stream: Stream, part: StreamPart) -> None:
        super().__init__()
        self._stream = stream
        self._part = part

    def __iter__(self) -> Iterator[HostBatch | WorkerFailure]:
        from torch.utils.data._utils import worker

        info = worker.get_worker_info()
        assert info is not None
        # A dataset that shares itself out among workers would share out a share: it is to give everything.
        worker._worker_info = None
        try:
            for batch in self._stream.batches(self._part, info.id, info.num_workers):
                yield sendable(batch)
        except TaskError as error:
            yield WorkerFailure(str(error))
