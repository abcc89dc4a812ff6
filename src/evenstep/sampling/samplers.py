"""In which order samples are used. Every sampler becomes one `Order` of ids, which all devices share out.

Task(..., sampler=samplers.Weighted(weights))          # with replacement, unless told otherwise
Task(..., sampler=samplers.Balanced(labels))           # every class equally often
Task(..., sampler=samplers.ByLength(lengths))          # batches of samples of like length
Task(..., sampler=samplers.Curriculum(difficulty))     # easy samples first
Task(..., sampler=samplers.Subset(ids))                # these samples alone
Task(..., sampler=samplers.Custom(sampler, repeats=True)) # a torch Sampler that draws with replacement

Samplers of the user's own, as torch knows them: their ids, listed and checked.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.errors import PlanError, TaskError
from evenstep.sampling.order import Lengths, Order, Span
from evenstep.sampling.rng import Ids, derive_seed, fork_rng, permuted, seed_host, uniforms

_SAY_SO = "if that is meant, say so: sampler=samplers.Custom(sampler, repeats=True)"


@dataclass(frozen=True, eq=False)
class Custom:
    """A torch Sampler of one's own: its ids, listed once an epoch on every rank under the same seeds.

    It may draw from Python's, NumPy's or torch's generator, or from one that it holds as `generator`; `set_epoch` is
    called if it has one. If it draws with replacement, say so: `Custom(sampler, repeats=True)`.
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
        number = derive_seed(seed, "sampler", epoch)
        with fork_rng():
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


__all__ = [
    "Balanced",
    "ByLength",
    "Curriculum",
    "Custom",
    "Sampler",
    "Sequential",
    "Shuffled",
    "Subset",
    "Weighted",
]

Values: TypeAlias = Any
"""One number per sample: a list, an array or a tensor."""


class Sampler(Protocol):
    """Anything that gives an order of ids."""

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        """The order of ids 0 to num_samples - 1; it may depend on these three and on nothing else."""


@dataclass(frozen=True)
class Sequential:
    """0, 1, 2, ... in every epoch."""

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        return Order(Lengths(num_samples), lambda epoch, start, stop: np.arange(start, stop), "in order")


@dataclass(frozen=True)
class Shuffled:
    """Every sample once an epoch, in an order that depends on seed and epoch alone. This is the default."""

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        def find(epoch: int, start: int, stop: int) -> Ids:
            return permuted(np.arange(start, stop), num_samples, (seed, epoch))

        return Order(Lengths(num_samples), find, "shuffled")


@dataclass(frozen=True, eq=False)
class Weighted:
    """Samples drawn in proportion to their weights: `num_samples` of them an epoch, as many as there are by default.

    Without replacement no sample comes twice in an epoch, and those of weight 0 not at all.
    """

    weights: Values
    num_samples: int | None = None
    replacement: bool = True

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        weights = _numbers(self.weights, num_samples, "weights").astype(np.float64)
        if not np.isfinite(weights).all() or weights.min() < 0:
            odd = int(np.flatnonzero(~(weights >= 0) | ~np.isfinite(weights))[0])
            raise TaskError(f"the weight of sample {odd} is {weights[odd]}; weights are finite and not below 0")
        if not weights.any():
            raise TaskError("all weights are 0, so no sample can be drawn; give some samples a weight above 0")
        if self.replacement:
            return self._with_replacement(weights, seed)
        return self._without_replacement(weights, seed)

    def _with_replacement(self, weights: NDArray[np.float64], seed: int) -> Order:
        num = _checked_num(self.num_samples, len(weights))
        heaps = np.cumsum(weights)
        last = int(np.flatnonzero(weights)[-1])

        def find(epoch: int, start: int, stop: int) -> Ids:
            drawn = uniforms((derive_seed(seed, "weighted"), epoch), start, stop) * heaps[-1]
            ids: Ids = np.minimum(np.searchsorted(heaps, drawn, side="right"), last)
            return ids

        members = _members(weights)
        return Order(Lengths(num), find, "weighted", True, identity=identity_of(weights, num), members=members)

    def _without_replacement(self, weights: NDArray[np.float64], seed: int) -> Order:
        possible = np.flatnonzero(weights)
        num = _checked_num(self.num_samples, len(possible))
        if num > len(possible):
            raise TaskError(
                f"{num} samples without replacement were asked for, and {len(possible)} have a weight above 0; "
                "ask for fewer, or draw with replacement"
            )
        scales = 1 / weights[possible]

        def find(epoch: int, start: int, stop: int) -> Ids:
            # Each sample waits for an exponential time at its own rate; the order of arrival is the weighted draw.
            drawn = uniforms((derive_seed(seed, "weighted once"), epoch), 0, len(possible))
            return possible[np.argsort(-np.log1p(-drawn) * scales, kind="stable")[start:stop]]

        name = "weighted without replacement"
        identity, members = identity_of(weights, num), _members(weights)
        return Order(Lengths(num), find, name, identity=identity, members=members, in_blocks=False)


@dataclass(frozen=True, eq=False)
class Balanced:
    """Every class equally often in an epoch, however rare it is; within a class all samples equally often, too.

    An epoch has `num_samples` samples, as many as there are by default. Over the epochs, no sample of a class comes
    again before all others of that class have come.
    """

    labels: Values
    num_samples: int | None = None

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        labels = _numbers(self.labels, num_samples, "labels", only_numbers=False)
        _, kinds = np.unique(labels, return_inverse=True)
        members = np.split(np.argsort(kinds, kind="stable"), np.cumsum(np.bincount(kinds))[:-1])
        num = _checked_num(self.num_samples, num_samples)

        def find(epoch: int, start: int, stop: int) -> Ids:
            # Turns go round the classes, and on from epoch to epoch; within an epoch they are shuffled.
            turns = epoch * num + permuted(np.arange(start, stop), num, (derive_seed(seed, "balanced"), epoch))
            deals, kinds_due = np.divmod(turns, len(members))
            ids = np.empty(len(turns), dtype=np.int64)
            order = np.argsort(kinds_due, kind="stable")
            for own in np.split(order, np.flatnonzero(np.diff(kinds_due[order])) + 1):
                kind = int(kinds_due[own[0]])
                ids[own] = _dealt(members[kind], deals[own], seed, kind)
            return ids

        return Order(Lengths(num), find, "balanced", repeats=True, identity=identity_of(kinds, num))


def _dealt(members: Ids, turns: Ids, seed: int, kind: int) -> Ids:
    """Members by turn: dealt out in a random order, shuffled again when all have been dealt."""
    rounds, places = np.divmod(turns, len(members))
    ids = np.empty(len(turns), dtype=np.int64)
    for number in np.unique(rounds).tolist():
        own = rounds == number
        ids[own] = members[permuted(places[own], len(members), (derive_seed(seed, "class", kind), number))]
    return ids


@dataclass(frozen=True, eq=False)
class ByLength:
    """Every sample once an epoch, in batches of like length, so that little is padded.

    Shuffled, cut into pools of `pool` batches, sorted by length within each pool; the batches of a pool are shuffled.
    """

    lengths: Values
    pool: int = 50

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        lengths = _numbers(self.lengths, num_samples, "lengths")
        if self.pool < 1:
            raise TaskError(f"pool is {self.pool}; it is a number of batches from 1 up")

        def find(epoch: int, start: int, stop: int) -> Ids:
            shuffled = permuted(np.arange(num_samples), num_samples, (derive_seed(seed, "by length"), epoch))
            pools = np.arange(num_samples) // (self.pool * batch)
            ranked = shuffled[np.lexsort((lengths[shuffled], pools))]
            # A short batch stays the last one, so that all others are whole batches of like length.
            num_whole = num_samples // batch
            drawn = uniforms((derive_seed(seed, "batches by length"), epoch), 0, num_whole)
            order = np.lexsort((drawn, np.arange(num_whole) // self.pool))
            whole = ranked[: num_whole * batch].reshape(num_whole, batch)[order]
            return np.concatenate([whole.reshape(-1), ranked[num_whole * batch :]])[start:stop]

        identity = identity_of(lengths, batch, self.pool)
        return Order(Lengths(num_samples), find, "by length", identity=identity, in_blocks=False)


@dataclass(frozen=True, eq=False)
class Curriculum:
    """Easy samples first: epoch 1 uses the easiest `pace[0]` of the samples, epoch 2 `pace[1]`, and so on; then all.

    Within an epoch, every sample in use comes once, shuffled.
    """

    difficulty: Values
    pace: Sequence[float] = (0.25, 0.5, 0.75)

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        difficulty = _numbers(self.difficulty, num_samples, "difficulty")
        if np.isnan(difficulty.astype(np.float64)).any():
            raise TaskError("the difficulty of some samples is NaN; give every sample a number")
        pace: tuple[Any, ...] = tuple(self.pace) if hasattr(self.pace, "__iter__") else (self.pace,)
        if not all(isinstance(part, int | float) and 0 < part <= 1 for part in pace):
            raise TaskError(f"pace is {pace}; give the part of the data in each of the first epochs: (0.3, 0.6)")
        by_ease = np.argsort(difficulty, kind="stable")
        lengths = Lengths(num_samples, tuple(max(1, round(part * num_samples)) for part in pace))

        def find(epoch: int, start: int, stop: int) -> Ids:
            in_use = lengths.of(epoch)
            assert in_use is not None
            return by_ease[permuted(np.arange(start, stop), in_use, (derive_seed(seed, "curriculum"), epoch))]

        return Order(lengths, find, "curriculum", identity=identity_of(by_ease, *lengths.first))


@dataclass(frozen=True, eq=False)
class Subset:
    """These samples alone, each once an epoch."""

    ids: Values
    shuffle: bool = True

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        ids = np.asarray(self.ids)
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            raise TaskError("a subset is a row of sample ids, whole numbers, at least one")
        check_ids(ids, num_samples, "the subset", repeats=False, advice="give each once")
        chosen = ids.astype(np.int64)

        def find(epoch: int, start: int, stop: int) -> Ids:
            if not self.shuffle:
                return chosen[start:stop]
            return chosen[permuted(np.arange(start, stop), len(chosen), (derive_seed(seed, "subset"), epoch))]

        identity, members = identity_of(chosen, self.shuffle), np.sort(chosen)
        return Order(Lengths(len(chosen)), find, "subset", identity=identity, members=members)


@dataclass(frozen=True)
class PerRank:
    """Data that every rank has brought itself, `sampler` giving the order of each: sample i of rank r has the id
    r * (samples of a rank) + i, and every rank has an equal part in every step."""

    sampler: Sampler
    num_ranks: int

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        part, left = divmod(batch, self.num_ranks)
        if left or not part:
            near = batch - left or self.num_ranks
            raise PlanError(
                f"a global batch of {batch} does not divide over {self.num_ranks} ranks with data of their own; "
                f"use {near} or {near + self.num_ranks}"
            )
        each = num_samples // self.num_ranks
        own = self.sampler.order(each, seed, part)

        def find(epoch: int, start: int, stop: int) -> Ids:
            places = np.arange(start, stop)
            begins = places // batch * part
            widths = np.minimum(part, (own.lengths.of(epoch) or 0) - begins)
            ranks, offsets = np.divmod(places % batch, widths)
            first, last = int(begins[0]), int((begins + widths).max())
            ids: Ids = ranks * each + own.ids(Span(epoch, first, last))[begins + offsets - first]
            return ids

        lengths = Lengths(
            (own.lengths.rest or 0) * self.num_ranks, tuple(n * self.num_ranks for n in own.lengths.first)
        )
        return replace(
            own,
            lengths=lengths,
            find=find,
            name=f"{own.name} of each rank",
            identity=f"{own.identity} {self.num_ranks} x {each} in batches of {batch}".strip(),
            num_ranks=self.num_ranks,
            _kept={},
        )


def _numbers(values: Values, num_samples: int, what: str, only_numbers: bool = True) -> NDArray[Any]:
    if hasattr(values, "detach"):  # a tensor, perhaps on a card, or with a gradient
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() and values.element_size() < 4 else values
    try:
        numbers = np.asarray(values)
    except ValueError as error:
        raise TaskError(f"{what} cannot be read as one number for each sample: {error}") from error
    if numbers.ndim != 1 or len(numbers) != num_samples:
        has = f"shape {numbers.shape}" if numbers.ndim != 1 else f"{len(numbers)} entries"
        raise TaskError(f"{what} has {has} and the data {num_samples} samples; give one number for each sample")
    if only_numbers and numbers.dtype.kind not in "biuf":
        raise TaskError(f"{what} holds {numbers.dtype}, not numbers; give one number for each sample")
    return numbers.astype(str) if numbers.dtype == object else numbers


def _checked_num(asked: int | None, otherwise: int) -> int:
    if asked is None:
        return otherwise
    if not hasattr(asked, "__index__") or asked < 1:
        raise TaskError(f"num_samples is {asked}; it is a whole number from 1 up: the samples of an epoch")
    return operator.index(asked)


def _members(weights: NDArray[np.float64]) -> Ids | None:
    return None if weights.all() else np.flatnonzero(weights)
