"""Going over the data once, in this process or in worker processes: what is read, before any device sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from evenstep.draws import Draws
from evenstep.order import Order
from evenstep.task import Batch as Data
from evenstep.worker.ahead import Begin, Pool, read_stream
from evenstep.worker.persample import Augment
from evenstep.worker.reading import Cut, HostBatch, Reader, requests
from evenstep.worker.source import Source
from evenstep.worker.stream import InWorkers, Stream, StreamPart

NOT_RESIDENT = (
    "--resident keeps tensors and arrays on the device, without augment or collate; use augment_batch, "
    "which works there, or leave --resident out"
)


def can_be_resident(source: Source | Stream, augments: bool) -> bool:
    """Whether the samples can live in a device's memory."""
    return not isinstance(source, Stream) and not source.is_slow(augments)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class Reading:
    """How samples are read and made ready."""

    seed: int = 0
    accumulate: int = 1
    augment: Augment | None = None
    augment_batch: Callable[[Data, Draws], Data] | None = None
    workers: int | None = None
    """Loader processes; None: one for each core that the training leaves free, where they are of use."""
    worker_init: Callable[[int], None] | None = None
    dataset: Any = None
    """What `worker_init` finds as its dataset."""
    drop_last: bool = False
    """Whether a stream's last batch is left out if it is short; other data has an order that knows."""
    resident: bool = False
    """Whether the data lives in the memory of the devices."""
    compare: bool = True
    """Whether the ranks compare what they read in the first batches."""
    fit: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    """The last change of a tensor on its device: its type, say."""


class Passes:
    """Passes over the data in one order; worker processes stay from one to the next, except a stream's."""

    def __init__(
        self,
        source: Stream | list[Source],
        order: Order | None,
        cut: Cut,
        batch: int,
        reading: Reading,
        num_workers: int,
        pinned: bool,
    ) -> None:
        self._order = order
        self._cut = cut
        self._batch = batch
        self._reading = reading
        self._num_workers = num_workers
        self._begin = Begin(reading.worker_init, reading.dataset)
        self._source = source
        self._reader = None
        if not isinstance(source, Stream):
            self._reader = Reader(source, cut, reading.seed, reading.augment, pinned)
        self._pool: Pool | None = None
        self._stream: Any = None

    def begin(self, epoch: int, start: int, num_checked: int) -> Iterator[HostBatch]:
        """The batches of an epoch from a place on."""
        if isinstance(self._source, Stream):
            return self._begin_stream(self._source, epoch, start, num_checked)
        assert self._reader is not None
        assert self._order is not None
        self._source[0].check_length()
        asked = requests(self._order, self._batch, epoch, start, num_checked)
        if not self._num_workers:
            return map(self._reader.read, asked)
        if self._pool is None:
            self._pool = Pool(self._reader, self._num_workers, self._begin)
        return self._pool.read(asked)

    def _begin_stream(self, stream: Stream, epoch: int, start: int, num_checked: int) -> Iterator[HostBatch]:
        reading = self._reading
        how = (reading.seed, reading.augment, reading.drop_last)
        part = StreamPart(self._cut, self._batch, *how, epoch, start, num_checked)
        if not self._num_workers:
            return stream.batches(part)
        self.close()
        self._stream = read_stream(InWorkers(stream, part), self._num_workers, self._begin)
        return self._stream  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None
