"""Which sample goes where, at which step: pure functions of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evenstep.errors import PlanError
from evenstep.sampling.rng import Ids

BLOCK = 1 << 16
"""Ids that are computed and kept at a time; a step takes a slice of them."""


def share(num: int, replica: int, num_replicas: int) -> range:
    """The contiguous part of `num` things that falls to one of `num_seats`; sizes differ by one at most.

    >>> [len(share(10, seat, 3)) for seat in range(3)]
    [4, 3, 3]
    """
    size, extra = divmod(num, num_replicas)
    start = replica * size + min(replica, extra)
    return range(start, start + size + (replica < extra))


def smallest_micro_batch(num: int, num_replicas: int, accumulate: int) -> int:
    """Samples of the smallest part that `num` of them are cut into; a seat with nothing to do still runs one.

    >>> smallest_micro_batch(65, 2, 1), smallest_micro_batch(65, 2, 10), smallest_micro_batch(1, 2, 1)
    (32, 3, 1)
    """
    num_micro = min(accumulate, len(share(num, 0, num_replicas)))
    return max(1, num // num_replicas // num_micro)


@dataclass(frozen=True)
class Span:
    """The samples of one optimizer step: places `start` to `stop` in the order of an epoch."""

    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Lengths:
    """How many samples each epoch has: `first` those of the first epochs, `rest` every later one.

    A stream's length is not known before it ends: its `rest` is None, and `first` the epochs that it has finished.
    """

    rest: int | None
    first: tuple[int, ...] = ()

    def of(self, epoch: int) -> int | None:
        """Samples of one epoch, if known."""
        return self.first[epoch] if epoch < len(self.first) else self.rest

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, place in it) after `position` samples; the end of an epoch is the start of the next."""
        for epoch, length in enumerate(self.first):
            if position < length:
                return epoch, position
            position -= length
        if self.rest is None:
            return len(self.first), position
        more, place = divmod(position, self.rest)
        return len(self.first) + more, place

    def begin(self, epoch: int) -> int:
        """The position at which an epoch begins."""
        return sum(self.first[:epoch]) + max(0, epoch - len(self.first)) * (self.rest or 0)

    def whole_batches(self, batch: int) -> Lengths:
        """Without what a short last batch of each epoch would hold."""
        rest = None if self.rest is None else self.rest - self.rest % batch
        return Lengths(rest, tuple(length - length % batch for length in self.first))

    def span(self, position: int, batch: int) -> Span:
        """The step that begins after `position` samples; it never reaches into the next epoch."""
        epoch, start = self.locate(position)
        length = self.of(epoch)
        return Span(epoch, start, start + batch if length is None else min(start + batch, length))


@dataclass(frozen=True)
class Order:
    """Sample ids by epoch and place: what every sampler becomes, and the only thing that a loader knows of it."""

    lengths: Lengths
    find: Callable[[int, int, int], Ids]
    """The ids of (epoch, start, stop)."""
    name: str
    repeats: bool = False
    """Whether an id may come twice in an epoch, by promise."""
    identity: str = ""
    """Differs between orders that a position would mean different samples in; the seed is kept apart."""
    members: Ids | None = None
    """The ids that it ever gives, if not all."""
    in_blocks: bool = True
    """Whether `find` is as cheap for a part of an epoch as for the whole, by share."""
    num_ranks: int = 1
    """Ranks that each have data of their own in it, `members` of which are numbered by each for itself."""
    dropped: Lengths = Lengths(0)
    """Samples of each epoch that are left out because its last batch is short."""
    _kept: dict[tuple[int, int], Ids] = field(default_factory=dict, repr=False, compare=False)

    def ids(self, span: Span) -> Ids:
        """The ids of one step."""
        size = BLOCK if self.in_blocks else self.lengths.of(span.epoch) or 1
        first, last = span.start // size, max(span.start, span.stop - 1) // size
        if first == last:
            ids = self._block(span.epoch, first, size)
            return ids[span.start - first * size : span.stop - first * size]
        parts = [self._block(span.epoch, number, size) for number in range(first, last + 1)]
        return np.concatenate(parts)[span.start - first * size : span.stop - first * size]

    def drop_last(self, batch: int) -> Order:
        """The same, less the short batch at the end of an epoch; its places are then those of this batch alone."""
        kept = self.lengths.whole_batches(batch)
        if kept == self.lengths:
            return self
        if 0 in (kept.rest, *kept.first):
            shortest = min(self.lengths.rest or 0, *self.lengths.first, batch)
            raise PlanError(
                f"drop_last leaves nothing of an epoch of {shortest} samples with a global batch of {batch}; "
                f"use --batch {shortest} or less"
            )
        dropped = Lengths(
            (self.lengths.rest or 0) - (kept.rest or 0),
            tuple(length - left for length, left in zip(self.lengths.first, kept.first, strict=True)),
        )
        identity = f"{self.identity} in whole batches of {batch}".strip()
        return replace(self, lengths=kept, dropped=dropped, identity=identity, _kept={})

    def _block(self, epoch: int, number: int, size: int) -> Ids:
        kept = self._kept.get((epoch, number))
        if kept is None:
            stop = min((number + 1) * size, self.lengths.of(epoch) or 0)
            kept = self.find(epoch, number * size, stop)
            while len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            self._kept[epoch, number] = kept
        return kept

    def facts(self, num_samples: int | None) -> dict[str, Any]:
        """What an audit needs to know of it."""
        lengths = {"first": list(self.lengths.first), "rest": self.lengths.rest}
        every = [*self.dropped.first, self.dropped.rest]
        dropped = {"dropped": every} if any(every) else {}
        return {"sampler": self.name, "repeats": self.repeats, "num_samples": num_samples, **lengths, **dropped}


def lengths_of(order: Order | None) -> Lengths:
    """Samples of each epoch; a stream's are not known before it ends."""
    return Lengths(None) if order is None else order.lengths


def order_name(order: Order | None) -> str:
    """Which order a position is a place in; a stream has its own."""
    return "stream" if order is None else f"{order.name} {order.identity}".strip()
