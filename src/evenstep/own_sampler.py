"""Samplers of the user's own, as torch knows them: their ids, listed and checked."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.draws import Ids, stream
from evenstep.errors import TaskError
from evenstep.order import Lengths, Order
from evenstep.seeding import left_alone, seed_host

_SAY_SO = "if that is meant, say so: sampler=samplers.Own(sampler, repeats=True)"


@dataclass(frozen=True, eq=False)
class Own:
    """A torch Sampler of one's own: its ids, listed once an epoch on every rank under the same seeds.

    It may draw from Python's, NumPy's or torch's generator, or from one that it holds as `generator`; `set_epoch` is
    called if it has one. If it draws with replacement, say so: `Own(sampler, repeats=True)`.
    """

    sampler: Iterable[int]
    repeats: bool = False

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        name = type(self.sampler).__name__
        length = self._length()
        once, again = (self._list(seed, 0, length) for _ in range(2))
        if not np.array_equal(once, again):
            raise TaskError(
                f"{name} gives another order when it is asked twice for the same epoch, so that no run could be "
                "resumed;\nlet it draw from torch's own generator, or from one that it holds as self.generator"
            )

        def find(epoch: int, start: int, stop: int) -> Ids:
            ids = self._list(seed, epoch, length)
            check_ids(ids, num_samples, name, self.repeats)
            return ids[start:stop]

        check_ids(once, num_samples, name, self.repeats)
        identity, members = identity_of(once), np.unique(once)
        return Order(Lengths(length), find, name, self.repeats, identity, members, in_blocks=False)

    def _length(self) -> int:
        try:
            length = len(self.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError) as error:
            raise TaskError(f"{type(self.sampler).__name__} has no length; give it a __len__: its ids an epoch") from (
                error
            )
        if length < 1:
            raise TaskError(f"{type(self.sampler).__name__} is empty; it must give at least one id")
        return length

    def _list(self, seed: int, epoch: int, length: int) -> Ids:
        name = type(self.sampler).__name__
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        number = stream(seed, "sampler", epoch)
        with left_alone():
            seed_host(number)
            generator = getattr(self.sampler, "generator", None)
            if generator is not None and hasattr(generator, "manual_seed"):
                generator.manual_seed(number)
            listed = list(islice(self.sampler, length + 1))
        if len(listed) != length:
            gave = len(listed) if len(listed) < length else f"more than {length}"
            raise TaskError(f"{name} gave {gave} ids in epoch {epoch + 1} and its length is {length}; make them agree")
        try:
            return np.array([operator.index(id_) for id_ in listed], dtype=np.int64)
        except TypeError:
            odd = next(id_ for id_ in listed if not hasattr(id_, "__index__"))
            raise TaskError(f"{name} gave {odd!r}; a sampler gives one sample id at a time, a whole number") from None


def check_ids(ids: Ids, num_samples: int, what: str, repeats: bool, advice: str = _SAY_SO) -> None:
    """Raise TaskError for an id that is not in the data, or comes twice against the promise."""
    outside = (ids < 0) | (ids >= num_samples)
    if outside.any():
        raise TaskError(
            f"{what} gave the id {int(ids[outside][0])}, and the data has {num_samples} samples: "
            f"ids go from 0 to {num_samples - 1}"
        )
    if repeats:
        return
    counts = np.bincount(ids, minlength=num_samples)
    twice = np.flatnonzero(counts > 1)
    if len(twice):
        raise TaskError(f"{what} gave the id {int(twice[0])} {int(counts[twice[0]])} times in one epoch; {advice}")


def identity_of(values: NDArray[Any], *more: object) -> str:
    """A short name for the numbers that an order was made of."""
    content = hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8)
    content.update(repr(more).encode())
    return content.hexdigest()
