"""This process's batches, in an order that depends on seed, epoch and position alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from evenstep.data.batches import BatchSplit, HostBatch, HostMicroBatch
from evenstep.data.consistency_check import BatchDigests
from evenstep.data.dataset import Rows, Source, no_rows
from evenstep.data.iterable import Stream
from evenstep.data.nested import concatenated, map_tensors
from evenstep.data.prefetch import (
    MAX_WORKERS,
    NOT_RESIDENT,
    GpuCopy,
    LoaderOptions,
    Passes,
    Prefetcher,
    can_be_resident,
    choose_workers,
    unchanged,
)
from evenstep.distributed.heartbeat import INPUT
from evenstep.distributed.world import World
from evenstep.errors import PlanError
from evenstep.sampling.batch_shares import Shares
from evenstep.sampling.order import Lengths, Order, Span, lengths_of, order_name
from evenstep.sampling.rng import Draws, Ids, fork_rng
from evenstep.sampling.samplers import PerRank, Sampler, Sequential, Subset
from evenstep.task import Batch as Data

Change = Callable[[Data, Draws], Data]
Move = Callable[[HostMicroBatch, torch.device], Data]
NUM_CHECKED = 2
"""Batches of a loader that the ranks compare."""


class MicroBatch:
    """The micro-batch of one replica. A replica without samples still runs one, which counts for nothing:
    collectives need every rank."""

    __slots__ = ("_inputs", "ids", "num_samples", "rows")

    def __init__(self, inputs: Data | None, ids: Ids, num_samples: int, rows: Rows | None = None) -> None:
        self._inputs = inputs
        self.ids = ids
        self.num_samples = num_samples
        self.rows = rows
        """Where the data is gathered from, if it is already on the GPU."""

    @property
    def inputs(self) -> Data:
        """What the loss gets: the samples of this replica, or the placeholder of one without samples."""
        if self._inputs is None and self.rows is not None:
            self._inputs = self.rows.fetch()
        return self._inputs

    @property
    def data(self) -> Data:
        """The samples of this replica; tensors without rows if it has none."""
        return self.inputs if self.num_samples else map_tensors(self.inputs, no_rows)

    def without_inputs(self) -> MicroBatch:
        """Its sample ids alone: what a message needs after the inputs are freed."""
        return MicroBatch(None, self.ids, self.num_samples)


@dataclass(slots=True, eq=False)
class Batch:
    """One optimizer step: a list of micro-batches, each with one part per replica of this process."""

    span: Span
    micro_batches: list[list[MicroBatch]]
    loader: Loader
    is_epoch_end: bool
    checked: BatchDigests | None
    is_finished: bool = False

    @property
    def num_samples(self) -> int:
        return len(self.span)

    @property
    def data(self) -> Data:
        """The samples of this process as the data collates them; tensors without rows if it has none."""
        parts = [part.data for part in self._parts if part.num_samples] or [self._parts[0].data]
        return concatenated(parts)

    def __iter__(self) -> Iterator[Any]:
        """`x, y = batch`"""
        return iter(self.data)

    @property
    def ids(self) -> Ids:
        """The samples of this process, in the global order."""
        return np.concatenate([part.ids for part in self._parts])

    @property
    def _parts(self) -> list[MicroBatch]:
        return [part for per_replica in zip(*self.micro_batches, strict=True) for part in per_replica]

    def finish(self) -> None:
        """Mark this step as taken: the loader's position moves past it, once."""
        if not self.is_finished:
            self.is_finished = True
            self.loader._finished(self)


class Loader:
    """Iterates over what is left of the current epoch; the next iteration is the next epoch."""

    def __init__(
        self,
        source: Source | Stream,
        order: Order | None,
        world: World,
        batch: int,
        options: LoaderOptions | None = None,
    ) -> None:
        options = options or LoaderOptions()
        if batch < 1 or options.accumulate < 1:
            raise PlanError(f"batch is {batch} and accumulate {options.accumulate}; both are whole numbers from 1 up")
        self.position = 0
        """Samples that finished steps have used, over all epochs."""
        self.num_finished = 0
        self.waited_seconds = 0.0
        """For batches, since this loader was made."""
        self.batch = batch
        self.accumulate = options.accumulate
        self.order = order
        self.num_samples = None if isinstance(source, Stream) else source.num_samples
        """Samples of the data; None for a stream."""
        self.lengths = lengths_of(order)
        self._source = source
        self._world = world
        self._options = options
        self.split = BatchSplit.of(world, options.accumulate)
        """How global batches are cut from now on."""
        self._left_to_check = NUM_CHECKED if options.compare and world.num_replicas > 1 else 0
        is_slow = isinstance(source, Stream) or source.is_slow(options.augment is not None)
        # Every worker iterates over the whole stream: more than one do not make it faster.
        most = 1 if isinstance(source, Stream) else MAX_WORKERS
        self._num_workers = choose_workers(options.workers, is_slow, world.size, most)
        self._stays = options.fit is unchanged and all(device.type == "cpu" for device in world.devices)
        on_gpus = all(device.type == "cuda" for device in world.devices)
        is_there = options.resident or (not isinstance(source, Stream) and source.is_on_gpu)
        # A dataset that may draw random numbers is not read in a thread beside a training that draws.
        self._copies: dict[torch.device, GpuCopy] = {}
        if on_gpus and not is_there and (self._num_workers or not is_slow):
            self._copies = {device: GpuCopy(device) for device in world.devices}
        self._sources = self._sources_by_device()
        self._training = self._passes(order, options)
        self._whole: Passes | None = None
        self._prefetcher: Prefetcher[Any] | None = None

    @property
    def epoch(self) -> int:
        """The number of finished epochs, which is the index of the current one."""
        return self.lengths.locate(self.position)[0]

    @property
    def is_between_epochs(self) -> bool:
        """Whether the last finished step was the last of its epoch."""
        return self.lengths.locate(self.position)[1] == 0

    def __len__(self) -> int:
        """Steps from here to the end of the epoch."""
        epoch, index = self.lengths.locate(self.position)
        length = self.lengths.of(epoch)
        if length is None:
            raise TypeError("a stream has no length before it ends")
        return -(-(length - index) // self.batch)

    def __iter__(self) -> Iterator[Batch]:
        is_rest = True
        while is_rest:
            if self._training.split is not self.split:
                # Read again from here, in other shares: what is prefetched has been cut already.
                self._training.close()
                self._training = self._passes(self.order, self._options)
            read = self._training.begin(*self.lengths.locate(self.position), self._left_to_check)
            is_rest = False
            with closing(self._delivered(read, self._options.augment_batch)) as batches:
                while not is_rest and (batch := self._next(batches)) is not None:
                    yield batch
                    batch.finish()
                    is_rest = self._training.split is not self.split and not batch.is_epoch_end

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        spans = self._world.spans
        # A trainer has announced it already.
        is_custom_loop = spans.heartbeat.phase != INPUT
        if is_custom_loop:
            spans.heartbeat.step = self.num_finished + 1
            spans.begin(INPUT)
        started = time.perf_counter()
        batch = next(batches, None)
        self.waited_seconds += time.perf_counter() - started
        if batch is None and is_custom_loop:
            # There is no next step, as far as is known.
            spans.heartbeat.step = self.num_finished
            spans.begin(INPUT)
        return batch

    def prepare(self, epoch: int) -> None:
        """Compute the order of an epoch while a GPU still trains in the one before; prefetching does so anyway."""
        if self.order is not None and not self._copies and not self._num_workers:
            self.order.prepare(epoch)

    def whole_pass(self) -> Iterator[Batch]:
        """Every sample that the order uses, once, unchanged, in the order of the data; the position does not move."""
        if self._whole is not None and self._whole.split is not self.split:
            self._whole.close()
            self._whole = None
        if self._whole is None:
            plain = replace(self._options, augment=None, drop_last=False)
            self._whole = self._passes(self._in_order(), plain)
            # Every replica then has samples of its own, unless the data has fewer than there are replicas.
            self._whole.least = self.split.least
        return self._delivered(self._whole.begin(0, 0, 0), None)

    def whole_data(self, num_batches: int | None = None) -> Iterator[Data]:
        """This process's share of all samples (or of the first `num_batches`): what a Scaler is fitted to.

        With virtual replicas it is all of them, on every process: what is added up does not depend on devices.
        """
        if self._world.num_virtual is not None:
            alone = replace(self._world, rank=0, size=1, devices=self._world.devices[:1], num_virtual=None)
            with closing(Loader(self._source, self.order, alone, self.batch, self._options)) as whole:
                yield from whole.whole_data(num_batches)
            return
        for batch in islice(self.whole_pass(), num_batches if self._world.counts else 0):
            for micro_batch in (micro_batch for per_replica in batch.micro_batches for micro_batch in per_replica):
                if micro_batch.num_samples:
                    yield micro_batch.data

    def peek(self) -> Data:
        """The first micro-batch of the next step, augmented as it will be; the position and generators do not move."""
        source = self._source if isinstance(self._source, Stream) else self._sources
        # In this process: no loader worker is started for one batch.
        passes = Passes(source, self.order, self.split, self.batch, self._options, num_workers=0, pinned=False)
        with fork_rng():
            host = next(iter(passes.begin(*self.lengths.locate(self.position), num_checked=0)))
            batch = self._made(host, self._moved, self._options.augment_batch)
        return batch.micro_batches[0][0].inputs

    def upcoming(self, replica: int) -> Batch:
        """The next step's first micro-batch of any replica, on each device of this process; the position stays."""
        split = replace(self.split, replicas=range(replica, replica + 1))
        source = self._source if isinstance(self._source, Stream) else self._sources[:1]
        passes = Passes(source, self.order, split, self.batch, self._options, num_workers=0, pinned=False)
        with fork_rng():
            host = next(iter(passes.begin(*self.lengths.locate(self.position), num_checked=0)))
            each = [host.micro_batches[0] * len(self._world.devices)]
            return self._made(replace(host, micro_batches=each), self._moved, self._options.augment_batch)

    def share_out(self, shares: Shares) -> None:
        """From the next batch on, give each replica its part in these proportions; all processes call this together."""
        num = self._world.num_replicas
        if len(shares) != num:
            raise PlanError(
                f"shares are {','.join(map(str, shares))}, and there are {num} devices; give a number for each, in the "
                "order of ranks"
            )
        self.split = replace(self.split, shares=shares)

    def state_dict(self) -> dict[str, Any]:
        """Where a later run resumes: the position, the steps taken, and the order they refer to."""
        return {
            "position": self.position,
            "num_finished": self.num_finished,
            "num_samples": self.num_samples,
            "order": order_name(self.order),
            "stream": list(self.lengths.first) if self.order is None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, with any number of processes."""
        self.position = state["position"]
        self.num_finished = state["num_finished"]
        if self.order is None:
            self.lengths = Lengths(None, tuple(state.get("stream") or ()))

    def facts(self) -> dict[str, Any]:
        """What an audit needs to know about the data and its order, and where this run starts."""
        order = {"sampler": "stream", "repeats": False, "num_samples": None, "first": [], "rest": None}
        if self.order is not None:
            order = self.order.facts(self.num_samples)
        elif self.lengths.first:
            order["first"] = list(self.lengths.first)
        return {**order, "step": self.num_finished, "position": self.position}

    def close(self) -> None:
        """Stop prefetching: end its threads and worker processes."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        for passes in (self._training, self._whole):
            if passes is not None:
                passes.close()

    def compared(self) -> None:
        """Count a batch that the ranks have compared."""
        self._left_to_check = max(0, self._left_to_check - 1)

    def _finished(self, batch: Batch) -> None:
        end = self.lengths.begin(batch.span.epoch) + batch.span.stop
        if self.position < end:
            self.position = end
            self.num_finished += 1
            if batch.is_epoch_end and self.order is None:
                self.lengths = replace(self.lengths, first=(*self.lengths.first, batch.span.stop))

    def _passes(self, order: Order | None, options: LoaderOptions) -> Passes:
        source = self._source if isinstance(self._source, Stream) else self._sources
        pinned = bool(self._copies) and not self._num_workers
        return Passes(source, order, self.split, self.batch, options, self._num_workers, pinned)

    def _in_order(self) -> Order | None:
        if self.order is None or self.num_samples is None:
            return None
        sampler: Sampler = Sequential() if self.order.members is None else Subset(self.order.members, shuffle=False)
        if self.order.num_ranks > 1:
            sampler = PerRank(sampler, self.order.num_ranks)
        return sampler.order(self.num_samples, self._options.seed, self.batch)

    def _delivered(self, batches: Iterator[HostBatch], change: Change | None) -> Generator[Batch]:
        if not self._copies:
            for host in batches:
                yield self._made(host, self._moved, change)
            return
        self._prefetcher = Prefetcher(batches, self._sent)
        with closing(self._prefetcher.made()) as sent:
            for host, events in sent:
                for event, device in zip(events, self._copies, strict=True):
                    torch.cuda.current_stream(device).wait_event(event)
                yield self._made(host, self._arrived, change)

    def _moved(self, micro_batch: HostMicroBatch, device: torch.device) -> Data:
        return map_tensors(micro_batch.data, lambda tensor: self._options.fit(tensor.to(device, non_blocking=True)))

    def _sent(self, host: HostBatch) -> tuple[HostBatch, list[torch.cuda.Event]]:
        """The batch, while it is copied to the GPUs; called in the prefetch thread."""
        micro_batches = [
            [self._copied(one, device) for one, device in zip(per_replica, self._world.devices, strict=True)]
            for per_replica in host.micro_batches
        ]
        return replace(host, micro_batches=micro_batches), [copy.sent() for copy in self._copies.values()]

    def _copied(self, micro_batch: HostMicroBatch, device: torch.device) -> HostMicroBatch:
        copy = self._copies[device]
        with copy.begin():
            return replace(micro_batch, data=map_tensors(micro_batch.data, copy.send))

    def _arrived(self, micro_batch: HostMicroBatch, device: torch.device) -> Data:
        copy = self._copies[device]
        return map_tensors(micro_batch.data, lambda tensor: self._options.fit(copy.arrive(tensor)))

    def _made(self, host: HostBatch, move: Move, change: Change | None) -> Batch:
        if self._stays and change is None:
            micro_batches = [
                [MicroBatch(one.data, one.ids, len(one.ids)) for one in per_replica]
                for per_replica in host.micro_batches
            ]
        else:
            micro_batches = [
                [
                    self._micro_batch(one, device, move, change, host.span.epoch)
                    for one, device in zip(per_replica, self._world.devices, strict=True)
                ]
                for per_replica in host.micro_batches
            ]
        return Batch(host.span, micro_batches, self, host.is_epoch_end, host.checked)

    def _micro_batch(
        self, host: HostMicroBatch, device: torch.device, move: Move, change: Change | None, epoch: int
    ) -> MicroBatch:
        rows = host.data if isinstance(host.data, Rows) else None
        if rows is not None and rows.device == device and change is None and self._options.fit is unchanged:
            return MicroBatch(None, host.ids, len(host.ids), rows)
        data = move(host if rows is None else replace(host, data=rows.fetch()), device)
        if change is not None:
            keys = host.keys if len(host.keys) else np.zeros(1, dtype=np.int64)
            data = change(data, Draws(keys, self._options.seed, epoch, device))
        return MicroBatch(data, host.ids, len(host.ids))

    def _sources_by_device(self) -> list[Source]:
        """A source for each of this process's devices: the same one, or a copy in the device's memory."""
        source, devices = self._source, self._world.devices
        if self._options.resident and not can_be_resident(source, self._options.augment is not None):
            raise PlanError(NOT_RESIDENT)
        if isinstance(source, Stream):
            return []
        if not self._options.resident:
            return [source for _ in devices]
        copies = {device: source.on(device) for device in set(devices)}
        return [copies[device] for device in devices]
