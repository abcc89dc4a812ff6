"""Reading samples by id: one index operation for tensors and arrays, one call per sample for anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from evenstep.data.augmentation import Collate, PerSample, SampleTransform, few
from evenstep.data.nested import map_fields
from evenstep.errors import TaskError
from evenstep.sampling.rng import Ids
from evenstep.task import Batch, describe


class Source:
    """Samples by id."""

    num_samples: int
    is_on_gpu = False
    """Whether the samples are already in GPU memory."""

    def is_slow(self, augments: bool) -> bool:
        """Whether Python runs for every sample, so that worker processes help."""
        return True

    def fetch(self, ids: Ids, keys: Ids, transform: SampleTransform, pinned: bool = False) -> Batch:
        """The samples as one batch; their random numbers depend on `keys`."""
        raise NotImplementedError

    def rows(self, ids: Ids, transform: SampleTransform) -> Rows | None:
        """The samples, to be gathered later; None if they cannot be."""
        return None

    def check_length(self) -> None:
        """Raise TaskError if there are no longer as many samples as there were."""

    def on(self, device: torch.device) -> Source:
        """The same samples in the device's memory; for those that are not slow."""
        raise NotImplementedError


def open_source(data: Any, collate: Collate | None, what: str = "train") -> Source:
    """The reader for `data`, or a TaskError that explains what is wrong with it."""
    if type(data) is TensorDataset:  # a subclass may define its own __getitem__
        data = data.tensors
    source: Source
    if type(data) is Subset:
        source = SubsetSource(open_source(data.dataset, collate, what), data.indices, what)
    elif _columns(data, what) is not None:
        source = Table(data, collate, what)
    else:
        source = Samples(data, collate, what)
    if source.num_samples == 0:
        raise TaskError(f"the {what} data is empty; it needs at least one sample")
    return source


def _columns(data: Any, what: str) -> list[Any] | None:
    if isinstance(data, torch.Tensor | np.ndarray):
        return [data]
    if isinstance(data, Mapping):
        values = list(data.values())
    elif isinstance(data, tuple):
        values = list(data)
    else:
        # A list is always a list of samples.
        return None
    of_numbers = [isinstance(value, torch.Tensor | np.ndarray) for value in values]
    if any(of_numbers) and not all(of_numbers):
        odd = type(values[of_numbers.index(False)]).__name__
        raise TaskError(
            f"the {what} data has tensors or arrays beside a {odd}; make all of its columns tensors or arrays, "
            "or give a list of samples"
        )
    return values if any(of_numbers) else None


class IdsOnDevice:
    """Sample ids on a GPU. Batches are slices of a block of ids, which is copied as a whole, once: a copy for each
    batch takes the host 50 us."""

    MOST = 1 << 20
    """Ids of a block that is kept there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One value: replicas of one process, each in a thread, may share this.
        self._kept: tuple[Ids | None, torch.Tensor] = (None, torch.empty(0, dtype=torch.int64))

    def find(self, ids: Ids) -> torch.Tensor:
        """The same ids on the device."""
        block = ids.base
        if not isinstance(block, np.ndarray) or not _is_slice(ids, block) or len(block) > self.MOST:
            return torch.from_numpy(ids).to(self.device, non_blocking=True)
        start = (_address(ids) - _address(block)) // ids.itemsize
        kept, copy = self._kept
        if kept is not block:
            host = torch.from_numpy(block)
            # A copy from memory that is not pinned would wait for the steps before it.
            host = host.pin_memory() if self.device.type == "cuda" else host
            copy = host.to(self.device, non_blocking=True)
            self._kept = block, copy
        return copy[start : start + len(ids)]


def _is_slice(ids: Ids, block: np.ndarray[Any, Any]) -> bool:
    """Whether ids lie in the block one after another."""
    return block.ndim == 1 and block.dtype == ids.dtype and block.strides == ids.strides == (ids.itemsize,)


def _address(ids: np.ndarray[Any, Any]) -> int:
    address: int = ids.__array_interface__["data"][0]
    return address


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples on a GPU that have not been gathered yet; a captured CUDA graph gathers them itself."""

    columns: Any
    ids: Ids
    on_device: IdsOnDevice

    @property
    def device(self) -> torch.device:
        return self.on_device.device

    def fetch(self) -> Batch:
        return self.at(self.on_device.find(self.ids))

    def at(self, index: torch.Tensor) -> Batch:
        return map_fields(self.columns, lambda column: column.index_select(0, index))


class Table(Source):
    """A tensor or array, or a tuple or dict of them; the first dimension counts samples."""

    def __init__(self, data: Any, collate: Collate | None, what: str) -> None:
        columns = _columns(data, what)
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
        self._rows = PerSample(self._read, collate)
        first = columns[0]
        self._device = first.device if isinstance(first, torch.Tensor) else torch.device("cpu")
        self._ids = IdsOnDevice(self._device)
        self.is_on_gpu = self._device.type == "cuda"
        self._is_plain_gpu = self.is_on_gpu and all(
            isinstance(column, torch.Tensor) and column.device == self._device and not column.requires_grad
            for column in columns
        )
        is_plain = all(isinstance(c, torch.Tensor) and c.is_cpu and not c.requires_grad for c in columns)
        # Bound once: looking them up in every step would take as long as much of the copying.
        self._selects = [column.index_select for column in columns] if is_plain else None

    def is_slow(self, augments: bool) -> bool:
        return augments or self._collate is not None

    def rows(self, ids: Ids, transform: SampleTransform) -> Rows | None:
        if self._collate is not None or transform.augments or not self._is_plain_gpu:
            return None
        return Rows(self._data, ids, self._ids)

    def fetch(self, ids: Ids, keys: Ids, transform: SampleTransform, pinned: bool = False) -> Batch:
        if self._collate is None and not transform.augments:
            index = torch.from_numpy(ids)
            if self._selects is not None and not pinned:
                return self._packed([select(0, index) for select in self._selects])
            if self._device.type != "cpu":
                index = index.to(self._device, non_blocking=True)
            return map_fields(self._data, lambda column: _take(column, ids, index, pinned))
        return self._rows.make(ids, keys, transform)

    def _packed(self, columns: list[torch.Tensor]) -> Batch:
        if type(self._data) is tuple:
            return tuple(columns)
        if isinstance(self._data, Mapping):
            return dict(zip(self._data, columns, strict=True))
        return type(self._data)(*columns) if isinstance(self._data, tuple) else columns[0]

    def _read(self, ids: list[int]) -> Iterator[Any]:
        return (map_fields(self._data, partial(_row, row=id_)) for id_ in ids)

    def on(self, device: torch.device) -> Table:
        moved = map_fields(self._data, lambda column: torch.as_tensor(column).to(device))
        return Table(moved, self._collate, "resident")


class Samples(Source):
    """Any map-style dataset."""

    def __init__(self, data: Any, collate: Collate | None, what: str) -> None:
        if not hasattr(data, "__getitem__"):
            raise TaskError(
                f"the {what} data is a {type(data).__name__}; give a dataset with __len__ and __getitem__, "
                "or a tuple or dict of tensors or arrays"
            )
        self._data = data
        self._rows = PerSample(self._read, collate)
        self._what = what
        self.num_samples = self._length()

    def _length(self) -> int:
        try:
            return len(self._data)
        except (TypeError, NotImplementedError) as error:
            name = type(self._data).__name__
            raise TaskError(f"the {self._what} data ({name}) has no length; give it a __len__") from error

    def check_length(self) -> None:
        now = self._length()
        if now != self.num_samples:
            raise TaskError(
                f"the {self._what} data had {self.num_samples} samples and now has {now}; "
                "a dataset must not grow or shrink while it is trained on"
            )

    def fetch(self, ids: Ids, keys: Ids, transform: SampleTransform, pinned: bool = False) -> Batch:
        return self._rows.make(ids, keys, transform)

    def _read(self, ids: list[int]) -> Iterator[Any]:
        many = getattr(self._data, "__getitems__", None)
        if callable(many):
            yield from self._together(many, ids)
            return
        for id_ in ids:
            try:
                sample = self._data[id_]
            except (Exception, SystemExit) as error:
                raise TaskError(f"sample {id_} cannot be read: {describe(error)}") from error
            yield sample

    def _together(self, many: Callable[[list[int]], Any], ids: list[int]) -> list[Any]:
        try:
            samples = list(many(ids))
        except (Exception, SystemExit) as error:
            raise TaskError(f"samples {few(ids)} cannot be read: {describe(error)}") from error
        if len(samples) != len(ids):
            raise TaskError(f"__getitems__ gave {len(samples)} samples for {len(ids)} ids; it must give one for each")
        return samples


class SubsetSource(Source):
    """Some samples of another source: what torch's Subset and random_split make."""

    def __init__(self, source: Source, indices: Any, what: str) -> None:
        self._indices = np.asarray(indices, dtype=np.int64)
        if len(self._indices) and not 0 <= self._indices.min() <= self._indices.max() < source.num_samples:
            raise TaskError(f"the {what} data is a Subset with ids outside its {source.num_samples} samples")
        self._source = source
        self.num_samples = len(self._indices)
        self.is_on_gpu = source.is_on_gpu

    def is_slow(self, augments: bool) -> bool:
        return self._source.is_slow(augments)

    def fetch(self, ids: Ids, keys: Ids, transform: SampleTransform, pinned: bool = False) -> Batch:
        return self._source.fetch(self._indices[ids], keys, transform, pinned)

    def rows(self, ids: Ids, transform: SampleTransform) -> Rows | None:
        return self._source.rows(self._indices[ids], transform)

    def check_length(self) -> None:
        self._source.check_length()

    def on(self, device: torch.device) -> SubsetSource:
        return SubsetSource(self._source.on(device), self._indices, "resident")


def _check_type(column: Any, what: str) -> None:
    try:
        _take(column, np.zeros(0, dtype=np.int64), torch.zeros(0, dtype=torch.int64), pinned=False)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"the {what} data has an array of {column.dtype}, which no tensor can hold; make it numbers"
        ) from error


def _take(column: Any, ids: Ids, index: torch.Tensor, pinned: bool) -> torch.Tensor:
    """Whole rows at once; six times as fast as `column[index]`, which copies element by element."""
    if not isinstance(column, torch.Tensor):
        return torch.from_numpy(np.ascontiguousarray(column.take(ids, axis=0)))
    if column.device != index.device:
        index = index.to(column.device)
    if not pinned or column.is_cuda or column.requires_grad:
        return column.index_select(0, index)
    rows = torch.empty((len(ids), *column.shape[1:]), dtype=column.dtype, pin_memory=True)
    return torch.index_select(column, 0, index, out=rows)


def _row(column: Any, row: int) -> Any:
    return column[row].clone() if isinstance(column, torch.Tensor) else torch.as_tensor(np.array(column[row]))


def no_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same kind of tensor for a batch of no samples, where the first dimension counts them."""
    return tensor[:0] if tensor.ndim and tensor.layout is torch.strided else tensor
