"""Which sample goes where, at which step: pure functions of (seed, epoch, position)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def share(num: int, seat: int, num_seats: int) -> range:
    """The contiguous part of `num` things that falls to one of `num_seats`; sizes differ by one at most.

    >>> [len(share(10, seat, 3)) for seat in range(3)]
    [4, 3, 3]
    """
    size, extra = divmod(num, num_seats)
    start = seat * size + min(seat, extra)
    return range(start, start + size + (seat < extra))


@dataclass(frozen=True)
class Span:
    """The samples of one optimizer step: places `start` to `stop` in the order of an epoch."""

    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def span_at(position: int, batch: int, num_samples: int) -> Span:
    """The step that begins after `position` samples; it never reaches into the next epoch."""
    epoch, start = divmod(position, num_samples)
    return Span(epoch, start, min(start + batch, num_samples))


class Order(Protocol):
    """Sample ids by epoch and place."""

    @property
    def num_samples(self) -> int: ...

    def ids(self, span: Span) -> Ids: ...


@dataclass(frozen=True)
class InOrder:
    """0, 1, 2, ... in every epoch."""

    num_samples: int

    def ids(self, span: Span) -> Ids:
        return np.arange(span.start, span.stop)


@dataclass(frozen=True)
class Shuffled:
    """Every sample once an epoch, in an order that depends on seed and epoch alone."""

    num_samples: int
    seed: int

    def ids(self, span: Span) -> Ids:
        return _permutation(self.num_samples, self.seed, span.epoch)[span.start : span.stop]


@lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> Ids:
    # Raw Philox words are the same in every NumPy release; Generator.permutation is not promised to be.
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_samples)
    return np.argsort(words, kind="stable")
