"""Samples of the user's own Python code: read one by one, augmented with draws that belong to the sample, collated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import default_collate

from evenstep.data.nested import map_fields
from evenstep.errors import TaskError
from evenstep.sampling.rng import Ids, derive_seed, is_same_state, restore_rng_states, rng_states, seed_host
from evenstep.task import Batch, describe

Collate = Callable[[list[Any]], Batch]
Augment = Callable[[Any, torch.Generator], Any]
Read = Callable[[list[int]], Iterator[Any]]


class SampleTransform:
    """Augments the samples of an epoch, with random numbers that depend only on (seed, epoch, key).

    The key is the sample's id; where a sampler repeats samples it is the position in the epoch, so that a repeated
    sample is augmented differently each time.
    """

    def __init__(self, seed: int, epoch: int, augment: Augment | None = None) -> None:
        self.augments = augment is not None
        self._where = (seed, epoch)
        self._augment = augment
        self._generator = torch.Generator()

    def begin(self, key: int, what: str = "data") -> None:
        """Seed the global generators, from which the user's code may draw for this sample."""
        seed, epoch = self._where
        seed_host(derive_seed(seed, what, epoch, key))

    def change(self, sample: Any, id_: int, key: int) -> Any:
        if self._augment is None:
            return sample
        seed, epoch = self._where
        try:
            return self._augment(sample, self._generator.manual_seed(derive_seed(seed, "augment", epoch, key)))
        except (Exception, SystemExit) as error:
            raise TaskError(f"sample {id_} cannot be augmented: {describe(error)}") from error


class PerSample:
    """Reading by the user's Python code: `read(ids)` yields samples, which are then augmented and collated.

    What these draw from the global generators of Python, NumPy and torch depends only on (seed, epoch, key), and the
    generators are restored. (For `__getitems__` and `collate`, the key is the first one of their share.) Seeding costs
    more than many samples do, so it starts with the first batch that draws; batches before that did not need it.
    """

    def __init__(self, read: Read, collate: Collate | None, *, can_read_again: bool = True) -> None:
        self._read = read
        self._collate = collate
        # Without a second read, no first try without seeds: the user's code may change samples in place.
        self._draws = not can_read_again
        self._reads_draw = can_read_again

    def make(self, ids: Ids, keys: Ids, transform: SampleTransform) -> Batch:
        if not (self._reads_draw or self._collate is not None or transform.augments):
            return collated(list(self._read(ids.tolist())), ids, self._collate)
        before = rng_states()
        if not self._draws:
            batch = self._made(ids, keys.tolist(), transform, seeds=False)
            if is_same_state(before, rng_states()):
                return batch
            self._draws = True
        try:
            return self._made(ids, keys.tolist(), transform, seeds=True)
        finally:
            restore_rng_states(before)

    def _made(self, ids: Ids, keys: list[int], transform: SampleTransform, seeds: bool) -> Batch:
        if not seeds and not transform.augments:
            return collated(list(self._read(ids.tolist())), ids, self._collate)
        if seeds:
            transform.begin(keys[0])
        samples = []
        reading = self._read(ids.tolist())
        for id_, key in zip(ids.tolist(), keys, strict=True):
            if seeds:
                transform.begin(key)
            sample = next(reading)
            samples.append(transform.change(sample, id_, key) if transform.augments else sample)
        if seeds:
            transform.begin(keys[0], "collate")
        return collated(samples, ids, self._collate)


def collated(samples: list[Any], ids: Ids, collate: Collate | None) -> Batch:
    """Samples as one batch, or a TaskError that names those that do not fit together."""
    try:
        return (collate or default_collate)(samples)
    except (Exception, SystemExit) as error:
        if isinstance(error, TaskError):
            raise
        if collate is not None:
            raise TaskError(f"the Task's collate cannot join samples {few(ids.tolist())}: {describe(error)}") from error
        shapes = [str(map_fields(sample, _shape)) for sample in samples]
        odd = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is None:
            raise TaskError(
                f"samples cannot be made into a batch: {describe(error)}; give the Task a collate"
            ) from error
        raise TaskError(
            f"sample {ids[0]} is {shapes[0]} and sample {ids[odd]} is {shapes[odd]}; "
            "make them alike, or give the Task a collate that can join them"
        ) from error


def few(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:4])) + (" and more" if len(ids) > 4 else "")


def _shape(value: Any) -> Any:
    if isinstance(value, Mapping | tuple | list):
        return map_fields(value, _shape)
    return tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
