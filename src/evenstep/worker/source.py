"""Reading samples by id: one index operation for tensors and arrays, one call per sample for anything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from evenstep.errors import TaskError
from evenstep.order import Ids
from evenstep.task import Batch, describe

Collate = Callable[[list[Any]], Batch]
Change = Callable[[Any, int], Any]


class Source(Protocol):
    """Samples by id."""

    num_samples: int

    def fetch(self, ids: Ids, change: Change | None = None) -> Batch:
        """The samples as one batch; `change(sample, id)` is applied to each first."""


def open_source(data: Any, collate: Collate | None, what: str = "train") -> Source:
    """The reader that fits `data`, or a TaskError that says what is wrong with it."""
    if type(data) is TensorDataset:  # a subclass may have a __getitem__ of its own
        data = data.tensors
    columns = _columns(data)
    source: Source = Table(data, collate, what) if columns is not None else Samples(data, collate, what)
    if source.num_samples == 0:
        raise TaskError(f"the {what} data is empty; it needs at least one sample")
    return source


def _columns(data: Any) -> list[Any] | None:
    if isinstance(data, torch.Tensor | np.ndarray):
        return [data]
    if isinstance(data, Mapping):
        values = list(data.values())
    elif isinstance(data, tuple):
        values = list(data)
    else:
        # A list is a list of samples, whatever they are.
        return None
    return values if values and all(isinstance(value, torch.Tensor | np.ndarray) for value in values) else None


class Table:
    """A tensor or array, or a tuple or dict of them; the first dimension counts samples."""

    def __init__(self, data: Any, collate: Collate | None, what: str) -> None:
        columns = _columns(data)
        assert columns is not None
        if any(column.ndim == 0 for column in columns):
            raise TaskError(f"the {what} data holds a tensor with no dimensions; the first one counts samples")
        lengths = [len(column) for column in columns]
        if len(set(lengths)) > 1:
            raise TaskError(f"the {what} data has columns of {lengths} samples; all need the same number")
        for column in columns:
            _check_type(column, what)
        self.num_samples = lengths[0]
        self._data = data
        self._collate = collate

    def fetch(self, ids: Ids, change: Change | None = None) -> Batch:
        if change is None and self._collate is None:
            index = torch.from_numpy(ids)
            return _each(self._data, lambda column: _take(column, ids, index))
        samples = [_each(self._data, partial(_row, row=id_)) for id_ in ids.tolist()]
        return _collated(samples, ids, change, self._collate)


class Samples:
    """Any map-style dataset."""

    def __init__(self, data: Any, collate: Collate | None, what: str) -> None:
        if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
            raise TaskError(
                f"the {what} data is a {type(data).__name__}; give a dataset with __len__ and __getitem__, "
                "or a tuple or dict of tensors or arrays"
            )
        try:
            self.num_samples = len(data)
        except (TypeError, NotImplementedError) as error:
            raise TaskError(f"the {what} data ({type(data).__name__}) has no length; give it a __len__") from error
        self._data = data
        self._collate = collate

    def fetch(self, ids: Ids, change: Change | None = None) -> Batch:
        many = getattr(self._data, "__getitems__", None)
        if callable(many):
            samples = self._together(many, ids.tolist())
        else:
            samples = [self._one(id_) for id_ in ids.tolist()]
        return _collated(samples, ids, change, self._collate)

    def _together(self, many: Callable[[list[int]], Any], ids: list[int]) -> list[Any]:
        try:
            samples = list(many(ids))
        except Exception as error:
            raise TaskError(f"samples {_few(ids)} cannot be read: {describe(error)}") from error
        if len(samples) != len(ids):
            raise TaskError(f"__getitems__ gave {len(samples)} samples for {len(ids)} ids; it must give one for each")
        return samples

    def _one(self, id_: int) -> Any:
        try:
            return self._data[id_]
        except Exception as error:
            raise TaskError(f"sample {id_} cannot be read: {describe(error)}") from error


def _collated(samples: list[Any], ids: Ids, change: Change | None, collate: Collate | None) -> Batch:
    if change is not None:
        samples = [change(sample, id_) for sample, id_ in zip(samples, ids.tolist(), strict=True)]
    try:
        return (collate or default_collate)(samples)
    except Exception as error:
        if isinstance(error, TaskError):
            raise
        if collate is not None:
            raise TaskError(
                f"the Task's collate cannot join samples {_few(ids.tolist())}: {describe(error)}"
            ) from error
        shapes = [str(_each(sample, _shape)) for sample in samples]
        odd = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is None:
            raise TaskError(
                f"samples cannot be made into a batch: {describe(error)}; give the Task a collate"
            ) from error
        raise TaskError(
            f"sample {ids[0]} is {shapes[0]} and sample {ids[odd]} is {shapes[odd]}; "
            "make them alike, or give the Task a collate that can join them"
        ) from error


def _few(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:4])) + (" and more" if len(ids) > 4 else "")


def _check_type(column: Any, what: str) -> None:
    try:
        _take(column, np.zeros(0, dtype=np.int64), torch.zeros(0, dtype=torch.int64))
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"the {what} data has an array of {column.dtype}, which no tensor can hold; make it numbers"
        ) from error


def _shape(value: Any) -> Any:
    if isinstance(value, Mapping | tuple | list):
        return _each(value, _shape)
    return tuple(value.shape) if hasattr(value, "shape") else type(value).__name__


def _each(data: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of every column (or field of a sample), in the container the user chose."""
    if isinstance(data, Mapping):
        return {name: function(value) for name, value in data.items()}
    if isinstance(data, tuple | list):
        return tuple(function(value) for value in data)
    return function(data)


def _take(column: Any, ids: Ids, index: torch.Tensor) -> torch.Tensor:
    if isinstance(column, torch.Tensor):
        return column[index]
    return torch.from_numpy(column[ids])


def _row(column: Any, row: int) -> Any:
    return column[row].clone() if isinstance(column, torch.Tensor) else torch.as_tensor(np.array(column[row]))


def to_device(data: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """`move` applied to every tensor of a batch, however it is nested; anything else stays as it is."""
    if isinstance(data, torch.Tensor):
        return move(data)
    if isinstance(data, Mapping):
        return {name: to_device(value, move) for name, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, move) for value in data))
    if isinstance(data, tuple | list):
        return type(data)(to_device(value, move) for value in data)
    return data
