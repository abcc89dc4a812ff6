"""The batches that one process reads, on the host: in the training process or in a loader worker."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from evenstep.data.augmentation import Augment, SampleTransform
from evenstep.data.consistency_check import BatchDigests, digest, replica_digests
from evenstep.data.dataset import Source
from evenstep.data.nested import map_tensors
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.sampling.batch_shares import Shares, enough_for_all, in_proportion, share
from evenstep.sampling.order import Order, Span
from evenstep.sampling.rng import Ids
from evenstep.task import Batch as Data


class Place(NamedTuple):
    """Which micro-batch of which virtual replica."""

    virtual: int
    micro: int


class TurnPart(NamedTuple):
    """One micro-batch of a virtual replica, with its index in the batch, in `places`, and among those of all."""

    at: int
    own: int
    number: int


class Turn(NamedTuple):
    """One virtual replica of a replica."""

    virtual: int
    micro_batches: list[TurnPart]
    """Those that have samples."""


class VirtualTurns(NamedTuple):
    """What the replicas of a process compute of batches of one size."""

    num_micro: int
    """Micro-batches of each virtual replica."""
    of_replicas: list[list[Turn]]
    """For each replica of the process, its virtual replicas in their order."""
    places: list[Place]
    """Of all these micro-batches."""


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is split: the replicas of this process, and the number of micro-batches."""

    replicas: range
    num_replicas: int
    accumulate: int
    shares: Shares | None = None
    """What each replica, of all processes, gets in proportion; None: equal shares."""
    num_virtual: int | None = None
    """Virtual replicas, if the batch is cut into such."""

    @classmethod
    def of(cls, world: World, accumulate: int) -> BatchSplit:
        return cls(world.replicas, world.num_replicas, accumulate, num_virtual=world.num_virtual)

    def by_replica(self, num: int) -> list[range]:
        """The samples out of `num` that each replica, of all processes, takes."""
        if self.num_virtual is not None:
            every = [share(num, virtual, self.num_virtual) for virtual in range(self.num_virtual)]
            parts = [every[own.start : own.stop] for own in self.virtual]
            return [range(own[0].start, own[-1].stop) if own else range(0) for own in parts]
        return self._dealt(num)

    @cached_property
    def virtual(self) -> tuple[range, ...]:
        """For each replica of all processes, the virtual replicas that it computes."""
        assert self.num_virtual is not None
        return tuple(self._dealt(self.num_virtual))

    @cached_property
    def _known_ranges(self) -> dict[int, list[list[range]]]:
        """By the number of samples; most batches have the same."""
        return {}

    @cached_property
    def _known_turns(self) -> dict[int, VirtualTurns]:
        return {}

    def _dealt(self, num: int) -> list[range]:
        if self.shares is not None:
            return in_proportion(num, self.shares)
        return [share(num, replica, self.num_replicas) for replica in range(self.num_replicas)]

    @property
    def least(self) -> int:
        """Samples of which every replica, or virtual replica, has some."""
        if self.num_virtual is not None:
            return self.num_virtual
        return self.num_replicas if self.shares is None else enough_for_all(self.shares)

    def num_micro(self, num: int) -> int:
        """Micro-batches of each virtual replica, out of `num` samples."""
        assert self.num_virtual is not None
        return min(self.accumulate, len(share(num, 0, self.num_virtual)))

    def places(self, num: int) -> list[list[Place | None]]:
        """With virtual replicas: whose each micro-batch is, in the order of `ranges`; None where a device has fewer."""
        return _places(self.virtual, self.replicas, self.num_micro(num))

    def turns(self, num: int) -> VirtualTurns:
        """With virtual replicas: what each replica of this process computes one after the other, out of `num`."""
        if num not in self._known_turns:
            places: list[Place] = []
            of_replicas = [self._turns_of(index, num, places) for index in range(len(self.replicas))]
            self._known_turns[num] = VirtualTurns(self.num_micro(num), of_replicas, places)
        return self._known_turns[num]

    def _turns_of(self, index: int, num: int, found: list[Place]) -> list[Turn]:
        """Those of one replica of this process, whose places are added to those found."""
        turns = {virtual: Turn(virtual, []) for virtual in self.virtual[self.replicas[index]]}
        for at, (samples, places) in enumerate(zip(self.ranges(num), self.places(num), strict=True)):
            place = places[index]
            if place is not None and samples[index]:
                number = place.virtual * self.num_micro(num) + place.micro
                turns[place.virtual].micro_batches.append(TurnPart(at, len(found), number))
                found.append(place)
        return list(turns.values())

    def ranges(self, num: int) -> list[list[range]]:
        """For each micro-batch, the samples out of `num` that each replica of this process takes."""
        if self.num_virtual is not None:
            if num not in self._known_ranges:
                self._known_ranges[num] = [[self._samples_of(one, num) for one in row] for row in self.places(num)]
            return self._known_ranges[num]
        if self.num_replicas == 1 and self.accumulate == 1:
            return [[range(num)]]
        shares, largest = self._own(num)
        # As many micro-batches on all replicas, because collectives must match.
        num_micro = min(self.accumulate, largest)
        return [
            [own[part.start : part.stop] for own in shares for part in [share(len(own), micro, num_micro)]]
            for micro in range(num_micro)
        ]

    def _own(self, num: int) -> tuple[list[range], int]:
        """The samples of each replica of this process, and the largest number that any replica has."""
        if self.shares is None:
            return [share(num, one, self.num_replicas) for one in self.replicas], len(share(num, 0, self.num_replicas))
        every = in_proportion(num, self.shares)
        return every[self.replicas.start : self.replicas.stop], max(map(len, every))

    def _samples_of(self, place: Place | None, num: int) -> range:
        if place is None:
            return range(0)
        assert self.num_virtual is not None
        own = share(num, place.virtual, self.num_virtual)
        part = share(len(own), place.micro, self.num_micro(num))
        return own[part.start : part.stop]


@lru_cache(maxsize=64)
def _places(virtual: tuple[range, ...], replicas: range, num_micro: int) -> list[list[Place | None]]:
    own = [[Place(one, micro) for one in virtual[replica] for micro in range(num_micro)] for replica in replicas]
    most = max(map(len, virtual)) * num_micro
    return [[places[at] if at < len(places) else None for places in own] for at in range(most)]


@dataclass(slots=True)
class Request:
    """The ids of one step."""

    span: Span
    ids: Ids
    """Of the whole global batch."""
    is_epoch_end: bool
    is_checked: bool
    """Whether the ranks compare what they read."""
    keys: Ids
    """What the random numbers of each sample depend on: its id, or its position where samples repeat."""


@dataclass(slots=True)
class HostMicroBatch:
    """The micro-batch of one replica, on the host; with no `ids`, its data is a placeholder that counts for nothing."""

    data: Data
    ids: Ids
    keys: Ids


@dataclass(slots=True)
class HostBatch:
    """One step as it was read: a list of micro-batches, each with one part per replica of this process."""

    span: Span
    micro_batches: list[list[HostMicroBatch]]
    is_epoch_end: bool
    checked: BatchDigests | None = None
    """None if the ranks do not compare this batch."""


@dataclass(frozen=True)
class WorkerFailure:
    """An error in a loader worker: the message of the TaskError that the training process raises."""

    message: str


def requests(order: Order, batch: int, rest: Span, num_checked: int, least: int = 1) -> Iterator[Request]:
    """The steps of the rest of an epoch; ranks compare the first `num_checked`.

    A last step with fewer than `least` samples is joined with the one before.
    """
    length = rest.stop
    left = len(rest) % batch
    joins = 0 < left < least and left < len(rest) and order.num_ranks == 1
    for number, first in enumerate(range(rest.start, length - left if joins else length, batch)):
        stop = min(first + batch, length)
        span = Span(rest.epoch, first, length if joins and length - stop == left else stop)
        ids = order.ids(span)
        keys = np.arange(span.start, span.stop) if order.repeats else ids
        yield Request(span, ids, span.stop == length, number < num_checked, keys)


class Reader:
    """Reads requests; each replica of this process has a source, shared or copied to its device."""

    def __init__(
        self, sources: list[Source], cut: BatchSplit, seed: int, augment: Augment | None, pinned: bool
    ) -> None:
        self._sources = sources
        self._split = cut
        self._is_whole = cut.num_replicas == 1 and cut.accumulate == 1 and cut.num_virtual in (None, 1)
        self._seed = seed
        self._augment = augment
        self._pinned = pinned
        self._transform: tuple[int, SampleTransform] | None = None

    def read(self, request: Request) -> HostBatch:
        transform = self._transform_of(request.span.epoch)
        ids, keys = request.ids, request.keys
        if self._is_whole and not request.is_checked:
            source = self._sources[0]
            data = source.rows(ids, transform) or source.fetch(ids, keys, transform, self._pinned)
            whole = HostMicroBatch(data, ids, keys)
            return HostBatch(request.span, [[whole]], request.is_epoch_end)
        micro_batches = [
            [self._micro_batch(*each, request, transform) for each in zip(self._sources, ranges, strict=True)]
            for ranges in self._split.ranges(len(ids))
        ]
        checked = None
        if request.is_checked:
            checked = BatchDigests(replica_digests(micro_batches), self._common(request, transform), digest(ids))
        return HostBatch(request.span, micro_batches, request.is_epoch_end, checked)

    def __getitem__(self, request: Request) -> HostBatch | WorkerFailure:
        """`read` as a DataLoader's dataset: its worker returns an error, which the training process raises."""
        try:
            return sendable(self.read(request))
        except TaskError as error:
            return WorkerFailure(str(error))

    def _micro_batch(self, source: Source, own: range, request: Request, transform: SampleTransform) -> HostMicroBatch:
        # A replica without samples still runs one, which counts for nothing: collectives need every rank.
        read = slice(own.start, own.stop) if own else slice(1)
        data = None if request.is_checked else source.rows(request.ids[read], transform)
        if data is None:
            data = source.fetch(request.ids[read], request.keys[read], transform, self._pinned)
        return HostMicroBatch(data, request.ids[own.start : own.stop], request.keys[own.start : own.stop])

    def _common(self, request: Request, transform: SampleTransform) -> str:
        """A digest of a sample that every rank reads; empty if reading it twice gives different data."""
        once, again = (digest([self._sources[0].fetch(request.ids[:1], request.keys[:1], transform)]) for _ in range(2))
        return once if once == again else ""

    def _transform_of(self, epoch: int) -> SampleTransform:
        if self._transform is None or self._transform[0] != epoch:
            self._transform = (epoch, SampleTransform(self._seed, epoch, self._augment))
        return self._transform[1]


def sendable(batch: HostBatch) -> HostBatch | WorkerFailure:
    """The batch, if it can be pickled: torch's sender thread drops one that cannot, and the training would hang."""
    try:
        for micro_batch in (micro_batch for per_replica in batch.micro_batches for micro_batch in per_replica):
            pickle.dumps(map_tensors(micro_batch.data, _checked_tensor))
    except Exception as error:
        return WorkerFailure(
            f"a batch cannot be sent from a loader worker: {type(error).__name__}: {error}; "
            "return plain tensors, numbers and strings, or use --workers 0"
        )
    return batch


def _checked_tensor(tensor: torch.Tensor) -> Any:
    if tensor.requires_grad and not tensor.is_leaf:
        raise ValueError("a tensor requires grad and is not a leaf; detach() it")
    return None
