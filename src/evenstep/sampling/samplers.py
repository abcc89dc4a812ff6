"""Samplers: each defines one global order of sample ids, which is split over the replicas.

Task(..., sampler=samplers.Weighted(weights))              # with replacement by default
Task(..., sampler=samplers.Balanced(labels))               # every class equally often
Task(..., sampler=samplers.ByLength(lengths))              # batches of samples of similar length
Task(..., sampler=samplers.Curriculum(difficulty))         # easy samples first
Task(..., sampler=samplers.Subset(ids))                    # these samples only
Task(..., sampler=samplers.Custom(sampler, repeats=True))  # a torch Sampler that draws with replacement
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
from evenstep.sampling.order import Lengths, Order, Span, permuted
from evenstep.sampling.rng import Ids, derive_seed, fork_rng, seed_host, uniforms

_IF_INTENDED = "if that is intended, use sampler=samplers.Custom(sampler, repeats=True)"


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
    """Anything that defines an order of ids."""

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        """The order of ids 0 to num_samples - 1; it may depend only on these three."""


@dataclass(frozen=True)
class Sequential:
    """0, 1, 2, ... in every epoch."""

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        return Order(Lengths(num_samples), lambda epoch, start, stop: np.arange(start, stop), "in order")


@dataclass(frozen=True)
class Shuffled:
    """Every sample once per epoch, in an order that depends only on seed and epoch. This is the default."""

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        def find(epoch: int, start: int, stop: int) -> Ids:
            return permuted(np.arange(start, stop), num_samples, (seed, epoch))

        return Order(Lengths(num_samples), find, "shuffled")


@dataclass(frozen=True, eq=False)
class Weighted:
    """Samples drawn in proportion to their weights: `num_samples` per epoch, by default the size of the data.

    Without replacement no sample occurs twice in an epoch; samples of weight 0 never occur.
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
        cumulative = np.cumsum(weights)
        last = int(np.flatnonzero(weights)[-1])

        def find(epoch: int, start: int, stop: int) -> Ids:
            drawn = uniforms((derive_seed(seed, "weighted"), epoch), start, stop) * cumulative[-1]
            ids: Ids = np.minimum(np.searchsorted(cumulative, drawn, side="right"), last)
            return ids

        members = _members(weights)
        return Order(Lengths(num), find, "weighted", True, identity=identity_of(weights, num), members=members)

    def _without_replacement(self, weights: NDArray[np.float64], seed: int) -> Order:
        possible = np.flatnonzero(weights)
        num = _checked_num(self.num_samples, len(possible))
        if num > len(possible):
            raise TaskError(
                f"num_samples is {num} without replacement, and {len(possible)} samples have a weight above 0; "
                "use a smaller num_samples, or draw with replacement"
            )
        scales = 1 / weights[possible]

        def find(epoch: int, start: int, stop: int) -> Ids:
            # Exponential waiting times with the weights as rates: their order is a weighted draw without replacement.
            drawn = uniforms((derive_seed(seed, "weighted once"), epoch), 0, len(possible))
            return possible[np.argsort(-np.log1p(-drawn) * scales, kind="stable")[start:stop]]

        name = "weighted without replacement"
        identity, members = identity_of(weights, num), _members(weights)
        return Order(Lengths(num), find, name, identity=identity, members=members, in_blocks=False)


@dataclass(frozen=True, eq=False)
class Balanced:
    """Every class equally often in an epoch, and within a class every sample equally often.

    An epoch has `num_samples` samples, by default the size of the data. Across epochs, no sample of a class is repeated
    before all others of its class have been used.
    """

    labels: Values
    num_samples: int | None = None

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        labels = _numbers(self.labels, num_samples, "labels", only_numbers=False)
        _, kinds = np.unique(labels, return_inverse=True)
        members = np.split(np.argsort(kinds, kind="stable"), np.cumsum(np.bincount(kinds))[:-1])
        num = _checked_num(self.num_samples, num_samples)

        def find(epoch: int, start: int, stop: int) -> Ids:
            # Turns rotate through the classes and continue in the next epoch; within an epoch they are shuffled.
            turns = epoch * num + permuted(np.arange(start, stop), num, (derive_seed(seed, "balanced"), epoch))
            rounds_due, kinds_due = np.divmod(turns, len(members))
            ids = np.empty(len(turns), dtype=np.int64)
            order = np.argsort(kinds_due, kind="stable")
            for own in np.split(order, np.flatnonzero(np.diff(kinds_due[order])) + 1):
                kind = int(kinds_due[own[0]])
                ids[own] = _members_by_turn(members[kind], rounds_due[own], seed, kind)
            return ids

        return Order(Lengths(num), find, "balanced", repeats=True, identity=identity_of(kinds, num))


def _members_by_turn(members: Ids, turns: Ids, seed: int, kind: int) -> Ids:
    """The members of a class for these turns: a random permutation per round."""
    rounds, positions = np.divmod(turns, len(members))
    ids = np.empty(len(turns), dtype=np.int64)
    for number in np.unique(rounds).tolist():
        own = rounds == number
        ids[own] = members[permuted(positions[own], len(members), (derive_seed(seed, "class", kind), number))]
    return ids


@dataclass(frozen=True, eq=False)
class ByLength:
    """Every sample once per epoch, in batches of similar length, to reduce padding.

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
            # An incomplete batch stays last, so that all others are complete batches of similar length.
            num_whole = num_samples // batch
            drawn = uniforms((derive_seed(seed, "batches by length"), epoch), 0, num_whole)
            order = np.lexsort((drawn, np.arange(num_whole) // self.pool))
            whole = ranked[: num_whole * batch].reshape(num_whole, batch)[order]
            return np.concatenate([whole.reshape(-1), ranked[num_whole * batch :]])[start:stop]

        identity = identity_of(lengths, batch, self.pool)
        return Order(Lengths(num_samples), find, "by length", identity=identity, in_blocks=False)


@dataclass(frozen=True, eq=False)
class Curriculum:
    """Easy samples first: epoch 1 uses the easiest fraction `pace[0]`, epoch 2 `pace[1]`, and so on; then all.

    Within an epoch, the samples in use are shuffled, each once.
    """

    difficulty: Values
    pace: Sequence[float] = (0.25, 0.5, 0.75)

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        difficulty = _numbers(self.difficulty, num_samples, "difficulty")
        if np.isnan(difficulty.astype(np.float64)).any():
            raise TaskError("the difficulty of some samples is NaN; give every sample a number")
        pace: tuple[Any, ...] = tuple(self.pace) if hasattr(self.pace, "__iter__") else (self.pace,)
        if not all(isinstance(part, int | float) and 0 < part <= 1 for part in pace):
            raise TaskError(f"pace is {pace}; give the fraction of the data for each of the first epochs: (0.3, 0.6)")
        by_ease = np.argsort(difficulty, kind="stable")
        lengths = Lengths(num_samples, tuple(max(1, round(part * num_samples)) for part in pace))

        def find(epoch: int, start: int, stop: int) -> Ids:
            in_use = lengths.of(epoch)
            assert in_use is not None
            return by_ease[permuted(np.arange(start, stop), in_use, (derive_seed(seed, "curriculum"), epoch))]

        return Order(lengths, find, "curriculum", identity=identity_of(by_ease, *lengths.first))


@dataclass(frozen=True, eq=False)
class Subset:
    """These samples only, each once per epoch."""

    ids: Values
    shuffle: bool = True

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        ids = np.asarray(self.ids)
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            raise TaskError("a subset is a non-empty list of sample ids, which are integers")
        check_ids(ids, num_samples, "the subset", repeats=False, advice="give each once")
        chosen = ids.astype(np.int64)

        def find(epoch: int, start: int, stop: int) -> Ids:
            if not self.shuffle:
                return chosen[start:stop]
            return chosen[permuted(np.arange(start, stop), len(chosen), (derive_seed(seed, "subset"), epoch))]

        identity, members = identity_of(chosen, self.shuffle), np.sort(chosen)
        return Order(Lengths(len(chosen)), find, "subset", identity=identity, members=members)


@dataclass(frozen=True, eq=False)
class Custom:
    """A custom torch Sampler: every rank lists its ids once per epoch, with the same seeds.

    It may draw from Python's, NumPy's or torch's generator, or from one that it holds as `generator`; `set_epoch` is
    called if it exists. If it draws with replacement, use `Custom(sampler, repeats=True)`.
    """

    sampler: Iterable[int]
    repeats: bool = False

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        name = type(self.sampler).__name__
        length = self._length()
        once, again = (self._list(seed, 0, length) for _ in range(2))
        if not np.array_equal(once, again):
            raise TaskError(
                f"{name} gives a different order when it is iterated twice for the same epoch, so no run could be "
                "resumed;\nlet it draw from torch's global generator, or from one in self.generator"
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
            raise TaskError(f"{name} gave {odd!r}; a sampler gives one sample id at a time, an integer") from None


@dataclass(frozen=True)
class PerRank:
    """Separate data on each rank, in the order of `sampler`; every rank has an equal share of each step.

    Sample i of rank r has the id r * (samples of a rank) + i.
    """

    sampler: Sampler
    num_ranks: int

    def order(self, num_samples: int, seed: int, batch: int) -> Order:
        part, left = divmod(batch, self.num_ranks)
        if left or not part:
            near = batch - left or self.num_ranks
            raise PlanError(
                f"a global batch of {batch} does not divide over {self.num_ranks} ranks with separate data; "
                f"use {near} or {near + self.num_ranks}"
            )
        each = num_samples // self.num_ranks
        own = self.sampler.order(each, seed, part)

        def find(epoch: int, start: int, stop: int) -> Ids:
            positions = np.arange(start, stop)
            begins = positions // batch * part
            widths = np.minimum(part, (own.lengths.of(epoch) or 0) - begins)
            ranks, offsets = np.divmod(positions % batch, widths)
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


def check_ids(ids: Ids, num_samples: int, what: str, repeats: bool, advice: str = _IF_INTENDED) -> None:
    """Raise TaskError for an id outside the data, and, unless `repeats`, for one that occurs twice."""
    outside = (ids < 0) | (ids >= num_samples)
    if outside.any():
        raise TaskError(
            f"{what} gave the id {int(ids[outside][0])}, and the data has {num_samples} samples: "
            f"ids range from 0 to {num_samples - 1}"
        )
    if repeats:
        return
    counts = np.bincount(ids, minlength=num_samples)
    twice = np.flatnonzero(counts > 1)
    if len(twice):
        raise TaskError(f"{what} gave the id {int(twice[0])} {int(counts[twice[0]])} times in one epoch; {advice}")


def identity_of(values: NDArray[Any], *more: object) -> str:
    """A short digest of the numbers that define an order."""
    content = hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8)
    content.update(repr(more).encode())
    return content.hexdigest()


def _numbers(values: Values, num_samples: int, what: str, only_numbers: bool = True) -> NDArray[Any]:
    if hasattr(values, "detach"):  # a tensor, perhaps on a GPU or with a gradient
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


def _checked_num(num: int | None, default: int) -> int:
    if num is None:
        return default
    if not hasattr(num, "__index__") or num < 1:
        raise TaskError(f"num_samples is {num}; it is an integer from 1 up: the samples per epoch")
    return operator.index(num)


def _members(weights: NDArray[np.float64]) -> Ids | None:
    return None if weights.all() else np.flatnonzero(weights)
