"""The order of samples: pure functions of seed, epoch and position. Shuffling, and the ids that each step uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evenstep.errors import PlanError
from evenstep.sampling.rng import GOLDEN, HALF, MIX, Ids, Words

BLOCK = 1 << 16
"""Ids that are computed and cached at a time; a step takes a slice of them."""


@dataclass(frozen=True)
class Span:
    """The samples of one optimizer step: positions `start` to `stop` of an epoch."""

    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Lengths:
    """The number of samples of each epoch: `first` lists the first epochs, `rest` is that of every later one.

    The length of a stream is unknown until it ends: `rest` is None, and `first` lists the finished epochs.
    """

    rest: int | None
    first: tuple[int, ...] = ()

    def of(self, epoch: int) -> int | None:
        """The number of samples of an epoch; None if unknown."""
        return self.first[epoch] if epoch < len(self.first) else self.rest

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, position in the epoch) after `position` samples; the end of an epoch is the start of the next."""
        for epoch, length in enumerate(self.first):
            if position < length:
                return epoch, position
            position -= length
        if self.rest is None:
            return len(self.first), position
        more, index = divmod(position, self.rest)
        return len(self.first) + more, index

    def begin(self, epoch: int) -> int:
        """The number of samples before an epoch."""
        return sum(self.first[:epoch]) + max(0, epoch - len(self.first)) * (self.rest or 0)

    def whole_batches(self, batch: int) -> Lengths:
        """The same, without the samples of an incomplete last batch."""
        rest = None if self.rest is None else self.rest - self.rest % batch
        return Lengths(rest, tuple(length - length % batch for length in self.first))

    def span(self, position: int, batch: int) -> Span:
        """The step that starts after `position` samples; it never crosses the end of an epoch."""
        epoch, start = self.locate(position)
        length = self.of(epoch)
        return Span(epoch, start, start + batch if length is None else min(start + batch, length))


@dataclass(frozen=True)
class Order:
    """Sample ids by epoch and position: what every sampler is turned into, and all that a loader sees of it."""

    lengths: Lengths
    find: Callable[[int, int, int], Ids]
    """The ids of (epoch, start, stop)."""
    name: str
    repeats: bool = False
    """Whether an id may occur more than once in an epoch."""
    identity: str = ""
    """Differs between orders in which a position means different samples; does not include the seed."""
    members: Ids | None = None
    """The ids that occur in this order; None: all."""
    in_blocks: bool = True
    """Whether `find` computes a part of an epoch at its share of the cost of the whole."""
    num_ranks: int = 1
    """Ranks with separate data; `members` then holds the ids of one rank."""
    dropped: Lengths = Lengths(0)
    """Samples of each epoch that drop_last leaves out."""
    _kept: dict[tuple[int, int], Ids] = field(default_factory=dict, repr=False, compare=False)

    def ids(self, span: Span) -> Ids:
        size = BLOCK if self.in_blocks else self.lengths.of(span.epoch) or 1
        first, last = span.start // size, max(span.start, span.stop - 1) // size
        if first == last:
            ids = self._block(span.epoch, first, size)
            return ids[span.start - first * size : span.stop - first * size]
        parts = [self._block(span.epoch, number, size) for number in range(first, last + 1)]
        return np.concatenate(parts)[span.start - first * size : span.stop - first * size]

    def prepare(self, epoch: int) -> None:
        """Compute the beginning of an epoch before its first batch is requested, if it depends on the seed alone."""
        if self.in_blocks and self.lengths.of(epoch):
            self._block(epoch, 0, BLOCK)

    def drop_last(self, batch: int) -> Order:
        """The same order without an incomplete last batch; positions are then valid for this batch size only."""
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
        """What an audit needs to know about this order."""
        lengths = {"first": list(self.lengths.first), "rest": self.lengths.rest}
        every = [*self.dropped.first, self.dropped.rest]
        dropped = {"dropped": every} if any(every) else {}
        return {"sampler": self.name, "repeats": self.repeats, "num_samples": num_samples, **lengths, **dropped}


def lengths_of(order: Order | None) -> Lengths:
    """The number of samples of each epoch; unknown for a stream, which has no order."""
    return Lengths(None) if order is None else order.lengths


def order_name(order: Order | None) -> str:
    """The name under which a checkpoint stores the order that its position refers to."""
    return "stream" if order is None else f"{order.name} {order.identity}".strip()


SORTED_UP_TO = 1 << 16
"""Permutations up to this length are made by sorting; longer ones are computed per position, without memory."""

_ROUNDS = 8

_PART = 1 << 14
"""Numbers whose rounds are computed together: the arrays of a part fit into a core's cache."""

_WORD = 64

_INDEX = np.uint64(SORTED_UP_TO - 1)


def permuted(positions: Ids, num: int, key: tuple[int, int]) -> Ids:
    """The elements at `positions` of the random permutation of 0 to num - 1 that belongs to `key`."""
    if num <= SORTED_UP_TO:
        words = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(num)
        # The index is in the low bits: no two words are equal, and a plain sort is six times as fast as argsort.
        words &= ~_INDEX
        words |= np.arange(num, dtype=np.uint64)
        words.sort()
        words &= _INDEX
        return words.astype(np.int64)[positions]
    # A Feistel network permutes the numbers below a power of two; results outside the range go through it again.
    rounds = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(_ROUNDS)
    bits = (num - 1).bit_length()
    # The array that owns the memory is one of int64: a batch is a slice of it, which GPU runs look up by its base.
    permuted_ids = positions.astype(np.int64)
    ids = permuted_ids.view(np.uint64)
    for start in range(0, len(ids), _PART):
        ids[start : start + _PART] = _feistel(ids[start : start + _PART], bits, rounds)
    outside = np.flatnonzero(ids >= num)
    while len(outside):
        ids[outside] = again = _feistel(ids[outside], bits, rounds)
        outside = outside[again >= num]
    return permuted_ids


def _feistel(values: Words, bits: int, rounds: Words) -> Words:
    right_bits = bits // 2
    left_bits = bits - right_bits
    left = values >> np.uint64(right_bits)
    right = values & np.uint64((1 << right_bits) - 1)
    words, high = np.empty_like(values), np.empty_like(values)
    for number, key in enumerate(rounds):
        into, by, bits_ = (left, right, left_bits) if number % 2 == 0 else (right, left, right_bits)
        # rng's `_mixed` without new arrays; its last line does not change the upper half, and only that half is used.
        np.add(by, key, out=words)
        words *= GOLDEN
        words ^= np.right_shift(words, HALF, out=high)
        words *= MIX
        words >>= np.uint64(_WORD - bits_)
        into ^= words
    return (left << np.uint64(right_bits)) | right
