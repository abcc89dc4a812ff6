"""This process's batches, in an order that depends on seed, epoch and position alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from evenstep.draws import Draws, Ids
from evenstep.errors import PlanError
from evenstep.order import Lengths, Order, Span, order_name
from evenstep.task import Batch as Data
from evenstep.worker.ahead import Ahead, CardCopy, Pool, choose_workers, read_stream
from evenstep.worker.reading import Cut, HostBatch, HostPiece, Reader, requests
from evenstep.worker.source import Augment, Source, Table, to_device
from evenstep.worker.stream import InWorkers, Stream, StreamPart
from evenstep.worker.world import World

NUM_CHECKED = 2
"""Batches of a loader's first pass that the ranks compare."""


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(slots=True, eq=False)
class Piece:
    """What one seat computes at once. A seat with nothing to do still runs one sample, which counts for nothing:
    collectives need every rank."""

    data: Data
    ids: Ids
    num_samples: int


@dataclass(slots=True, eq=False)
class Batch:
    """One optimizer step: for each micro-batch, a piece for every seat of this process."""

    span: Span
    micro_batches: list[list[Piece]]
    loader: Loader
    is_epoch_end: bool
    digests: list[str] | None

    @property
    def num_samples(self) -> int:
        """Samples of the whole global batch."""
        return len(self.span)

    @property
    def ids(self) -> Ids:
        """The samples of this process, in the global order."""
        return np.concatenate([piece.ids for pieces in zip(*self.micro_batches, strict=True) for piece in pieces])

    def finish(self) -> None:
        """Say that the optimizer has taken this step: the loader's position moves past it, once."""
        self.loader._finished(self)


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
    resident: bool = False
    """Whether the data lives in the memory of the devices."""
    compare: bool = True
    """Whether the ranks compare what they read in the first batches."""
    fit: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    """The last change of a tensor on its device: its type, say."""


class Loader:
    """Iterates over what is left of the current epoch; the next iteration is the next epoch."""

    def __init__(
        self, source: Source | Stream, order: Order | None, world: World, batch: int, reading: Reading | None = None
    ) -> None:
        reading = reading or Reading()
        if batch < 1 or reading.accumulate < 1:
            raise PlanError(f"batch is {batch} and accumulate {reading.accumulate}; both are whole numbers from 1 up")
        self.position = 0
        """Samples that finished steps have used, over all epochs."""
        self.num_finished = 0
        self.order = order
        self.num_samples = None if isinstance(source, Stream) else source.num_samples
        """Samples of the data; None for a stream."""
        self.lengths = order.lengths if order is not None else Lengths(None)
        self._source = source
        self._world = world
        self._batch = batch
        self._reading = reading
        self._cut = Cut.of(world, reading.accumulate)
        self._left_to_check = NUM_CHECKED if reading.compare and world.num_seats > 1 else 0
        is_slow = isinstance(source, Stream) or source.is_slow(reading.augment is not None)
        self._num_workers = choose_workers(reading.workers, is_slow, world.size)
        on_cards = all(device.type == "cuda" for device in world.devices)
        self._stays = reading.fit is as_it_is and all(device.type == "cpu" for device in world.devices)
        # A dataset that may draw at random is not read beside a training that draws.
        self._copies: dict[torch.device, CardCopy] = {}
        if on_cards and not reading.resident and (self._num_workers or not is_slow):
            self._copies = {device: CardCopy(device) for device in world.devices}
        self._pool: Pool | None = None
        self._reader: Reader | None = None
        if not isinstance(source, Stream):
            pinned = bool(self._copies) and not self._num_workers
            sources = self._moved_in(source) if reading.resident else [source] * len(world.devices)
            self._reader = Reader(sources, self._cut, reading.seed, reading.augment, pinned)

    @property
    def epoch(self) -> int:
        """Epochs that are finished, which is the number of the one that goes on, counted from 0."""
        return self.lengths.locate(self.position)[0]

    @property
    def is_between_epochs(self) -> bool:
        """Whether the last finished step was the last of its epoch."""
        return self.lengths.locate(self.position)[1] == 0

    def __len__(self) -> int:
        """Steps from here to the end of the epoch."""
        epoch, place = self.lengths.locate(self.position)
        length = self.lengths.of(epoch)
        if length is None:
            raise TypeError("a stream has no length before it ends")
        return -(-(length - place) // self._batch)

    def __iter__(self) -> Iterator[Batch]:
        num_checked, self._left_to_check = self._left_to_check, 0
        with closing(self._pass(*self.lengths.locate(self.position), num_checked)) as batches:
            for batch in batches:
                yield batch
                batch.finish()

    def whole_pass(self) -> Iterator[Batch]:
        """Every sample once, from the first to the last; the position does not move."""
        return self._pass(0, 0, 0)

    def whole_data(self) -> Iterator[Data]:
        """This process's part of every sample once, as its batches hold it: what a Scaler is fitted on."""
        for batch in self.whole_pass():
            for piece in (piece for pieces in batch.micro_batches for piece in pieces):
                if piece.num_samples:
                    yield piece.data

    def state_dict(self) -> dict[str, Any]:
        """Where a later run goes on: a position, the steps that led there, and the order that gives it meaning."""
        return {
            "position": self.position,
            "num_finished": self.num_finished,
            "num_samples": self.num_samples,
            "order": order_name(self.order),
            "stream": list(self.lengths.first) if self.order is None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken, by any number of processes."""
        self.position = state["position"]
        self.num_finished = state["num_finished"]
        if self.order is None:
            self.lengths = Lengths(None, tuple(state.get("stream") or ()))

    def facts(self) -> dict[str, Any]:
        """What an audit needs to know of the data and its order, and where this run begins."""
        order = {"sampler": "stream", "repeats": False, "num_samples": None, "first": [], "rest": None}
        if self.order is not None:
            order = self.order.facts(self.num_samples)
        elif self.lengths.first:
            order["first"] = list(self.lengths.first)
        return {**order, "step": self.num_finished, "position": self.position}

    def close(self) -> None:
        """End the loader's worker processes, if it has any."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _finished(self, batch: Batch) -> None:
        end = self.lengths.begin(batch.span.epoch) + batch.span.stop
        if self.position < end:
            self.position = end
            self.num_finished += 1
            if batch.is_epoch_end and self.order is None:
                self.lengths = replace(self.lengths, first=(*self.lengths.first, batch.span.stop))

    def _pass(self, epoch: int, start: int, num_checked: int) -> Generator[Batch]:
        """The batches of an epoch from a place on, on their devices."""
        batches = self._host_batches(epoch, start, num_checked)
        if not self._copies:
            for host in batches:
                yield self._on_devices(host)
            return
        with closing(Ahead(batches, self._sent).made()) as sent:
            for host, events in sent:
                yield self._arrived(host, events)

    def _host_batches(self, epoch: int, start: int, num_checked: int) -> Iterator[HostBatch]:
        reading = self._reading
        if isinstance(self._source, Stream):
            part = StreamPart(self._cut, self._batch, reading.seed, reading.augment, epoch, start, num_checked)
            if self._num_workers:
                return read_stream(InWorkers(self._source, part), self._num_workers, reading.worker_init)
            return self._source.batches(part)
        assert self._reader is not None
        assert self.order is not None
        self._source.check_length()
        asked = requests(self.order, self._batch, epoch, start, num_checked)
        if not self._num_workers:
            return map(self._reader.read, asked)
        if self._pool is None:
            self._pool = Pool(self._reader, self._num_workers, reading.worker_init)
        return self._pool.read(asked)

    def _on_devices(self, host: HostBatch) -> Batch:
        if self._stays:
            return self._made(host, lambda piece, device: piece.data)
        return self._made(host, lambda piece, device: to_device(piece.data, lambda tensor: self._move(tensor, device)))

    def _move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return self._reading.fit(tensor.to(device, non_blocking=True))

    def _sent(self, host: HostBatch) -> tuple[HostBatch, list[torch.cuda.Event]]:
        """The batch on its way to the cards; called ahead of time, in a thread of its own."""
        micro_batches = []
        for pieces in host.micro_batches:
            moved = []
            for piece, device in zip(pieces, self._world.devices, strict=True):
                with self._copies[device].begin():
                    moved.append(HostPiece(to_device(piece.data, self._copies[device].send), piece.ids, piece.keys))
            micro_batches.append(moved)
        return replace(host, micro_batches=micro_batches), [copy.sent() for copy in self._copies.values()]

    def _arrived(self, host: HostBatch, events: list[torch.cuda.Event]) -> Batch:
        for event, device in zip(events, self._copies, strict=True):
            torch.cuda.current_stream(device).wait_event(event)

        def place(piece: HostPiece, device: torch.device) -> Data:
            copy = self._copies[device]
            return to_device(piece.data, lambda tensor: self._reading.fit(copy.arrive(tensor)))

        return self._made(host, place)

    def _made(self, host: HostBatch, place: Callable[[HostPiece, torch.device], Data]) -> Batch:
        micro_batches = [
            [
                Piece(self._augmented(place(piece, device), piece, host.span, device), piece.ids, len(piece.ids))
                for piece, device in zip(pieces, self._world.devices, strict=True)
            ]
            for pieces in host.micro_batches
        ]
        return Batch(host.span, micro_batches, self, host.is_epoch_end, host.digests)

    def _augmented(self, data: Data, piece: HostPiece, span: Span, device: torch.device) -> Data:
        change = self._reading.augment_batch
        if change is None:
            return data
        keys = piece.keys if len(piece.keys) else np.zeros(1, dtype=np.int64)
        return change(data, Draws(keys, self._reading.seed, span.epoch, device))

    def _moved_in(self, source: Source) -> list[Source]:
        if not isinstance(source, Table) or source.is_slow(self._reading.augment is not None):
            raise PlanError(
                "--resident keeps tensors and arrays on the device, without augment or collate; use augment_batch, "
                "which works there, or leave --resident out"
            )
        copies = {device: source.on(device) for device in set(self._world.devices)}
        return [copies[device] for device in self._world.devices]
