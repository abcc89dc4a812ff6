"""Samples that Python code of the user's makes, one by one: read, augmented, collated, and drawn for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import default_collate

from evenstep.draws import Ids, stream
from evenstep.errors import TaskError
from evenstep.seeding import generator_states, is_same_state, restore_generators, seed_host
from evenstep.task import Batch, describe

Collate = Callable[[list[Any]], Batch]
Augment = Callable[[Any, torch.Generator], Any]
Read = Callable[[list[int]], Iterator[Any]]


class Touch:
    """What is done with each sample of an epoch: draws depend on (seed, epoch, key), and then it is augmented.

    The key is the sample's id; where a sampler repeats samples it is the place in the epoch, so that a sample that
    comes twice is not changed the same way twice.
    """

    def __init__(self, seed: int, epoch: int, augment: Augment | None = None) -> None:
        self.augments = augment is not None
        self._where = (seed, epoch)
        self._augment = augment
        self._generator = torch.Generator()

    def begin(self, key: int, what: str = "data") -> None:
        """Seed what the user's code may draw from while it makes this sample."""
        seed, epoch = self._where
        seed_host(stream(seed, what, epoch, key))

    def change(self, sample: Any, id_: int, key: int) -> Any:
        """The augmented sample."""
        if self._augment is None:
            return sample
        seed, epoch = self._where
        try:
            return self._augment(sample, self._generator.manual_seed(stream(seed, "augment", epoch, key)))
        except (Exception, SystemExit) as error:
            raise TaskError(f"sample {id_} cannot be augmented: {describe(error)}") from error


class PerSample:
    """Reading by Python code of the user's: `read(ids)` gives samples, which are then augmented and collated.

    Draws of all three from Python's, NumPy's and torch's own generators depend on (seed, epoch, key) alone, and
    disturb nobody. (What `__getitems__` and `collate` draw depends on the first key of the share that they get.)
    Seeding costs more than many a sample, so it begins when a draw was first seen: what was made before that did not
    draw, and is right without.
    """

    def __init__(self, read: Read, collate: Collate | None, *, can_read_again: bool = True) -> None:
        self._read = read
        self._collate = collate
        # What cannot be read again cannot be tried first: the user's code may change samples in place.
        self._draws = not can_read_again
        self._reads_draw = can_read_again

    def make(self, ids: Ids, keys: Ids, touch: Touch | None) -> Batch:
        """A batch of these samples."""
        runs_code = self._reads_draw or self._collate is not None or (touch is not None and touch.augments)
        if touch is None or not runs_code:
            return collated(list(self._read(ids.tolist())), ids, self._collate)
        before = generator_states()
        if not self._draws:
            batch = self._made(ids, keys.tolist(), touch, seeds=False)
            if is_same_state(before, generator_states()):
                return batch
            self._draws = True
        try:
            return self._made(ids, keys.tolist(), touch, seeds=True)
        finally:
            restore_generators(before)

    def _made(self, ids: Ids, keys: list[int], touch: Touch, seeds: bool) -> Batch:
        if not seeds and not touch.augments:
            return collated(list(self._read(ids.tolist())), ids, self._collate)
        if seeds:
            touch.begin(keys[0])
        samples = []
        reading = self._read(ids.tolist())
        for id_, key in zip(ids.tolist(), keys, strict=True):
            if seeds:
                touch.begin(key)
            sample = next(reading)
            samples.append(touch.change(sample, id_, key) if touch.augments else sample)
        if seeds:
            touch.begin(keys[0], "collate")
        return collated(samples, ids, self._collate)


def collated(samples: list[Any], ids: Ids, collate: Collate | None) -> Batch:
    """Samples as one batch, or a TaskError that says which ones do not fit together."""
    try:
        return (collate or default_collate)(samples)
    except (Exception, SystemExit) as error:
        if isinstance(error, TaskError):
            raise
        if collate is not None:
            raise TaskError(f"the Task's collate cannot join samples {few(ids.tolist())}: {describe(error)}") from error
        shapes = [str(each(sample, _shape)) for sample in samples]
        odd = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is None:
            raise TaskError(
                f"samples cannot be made into a batch: {describe(error)}; give the Task a collate"
            ) from error
        raise TaskError(
            f"sample {ids[0]} is {shapes[0]} and sample {ids[odd]} is {shapes[odd]}; "
            "make them alike, or give the Task a collate that can join them"
        ) from error


def few(ids: list[int]) -> str:
    """The first ids, for a message."""
    return ", ".join(map(str, ids[:4])) + (" and more" if len(ids) > 4 else "")


def _shape(value: Any) -> Any:
    if isinstance(value, Mapping | tuple | list):
        return each(value, _shape)
    return tuple(value.shape) if hasattr(value, "shape") else type(value).__name__


def each(data: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of every column (or field of a sample), in the container the user chose."""
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(function(value) for value in data))
    if isinstance(data, tuple | list):  # before Mapping, which is slow to ask for
        return tuple([function(value) for value in data])
    if isinstance(data, Mapping):
        return {name: function(value) for name, value in data.items()}
    return function(data)
