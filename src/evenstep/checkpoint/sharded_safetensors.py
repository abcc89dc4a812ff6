"""safetensors files of whole tensors that all ranks write at once, and of which a rank reads its own rows.

In such a file the rows of a tensor lie one after the other, so that a shard along the first dimension is one range of
bytes. Rank 0 writes the header and makes the file as long as it will be; then every rank writes its rows into it. No
rank holds more than its shards, nothing is sent, and the file is like any other: no reader sees how many wrote it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import torch

from evenstep.checkpoint.files import tensor_table
from evenstep.checkpoint.shards import gathered, own_rows
from evenstep.distributed.parameter_slices import PartOfParameter
from evenstep.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WRITE_BYTES = 2**26
"""Bytes of one read or write; the kernel takes no more than 2 GiB."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, which is read when it is needed."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: torch.Size
    position: int
    """Of its first byte in the file."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """All of it, or some of its rows."""
        first, last, _ = slice(start, stop).indices(self.shape[0] if self.ndim else 1)
        shape = (max(0, last - first), *self.shape[1:]) if self.ndim else ()
        row_bytes = self.shape[1:].numel() * self.dtype.itemsize
        # Not mapped: that would count as memory of this process, the whole file of it.
        found = torch.empty(shape, dtype=self.dtype)
        if found.numel():
            plain = torch.view_as_real(found) if found.is_complex() else found
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.position + first * row_bytes)
                _read_into(_bytes_of(plain), file, self.path)
        return found


def _read_into(data: memoryview, file: FileIO, path: Path) -> None:
    while data:
        num = file.readinto(data[:WRITE_BYTES])
        if not num:
            raise CheckpointError(f"{path} is damaged: it is shorter than its header says")
        data = data[num:]


@dataclass(frozen=True)
class SlicedTensor:
    """A slice of a tensor, which becomes whole when all ranks of a replica write it."""

    local: torch.Tensor
    part: PartOfParameter

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.part.shape)


Readable: TypeAlias = torch.Tensor | StoredTensor
Writable: TypeAlias = torch.Tensor | StoredTensor | SlicedTensor


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; only its header is read."""
    table = tensor_table(path)  # by safetensors, which refuses a header that is not valid
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: StoredTensor(
            path, name, _dtype(path, name, kind), torch.Size(shape), 8 + length + header[name]["data_offsets"][0]
        )
        for name, (kind, shape) in table.items()
    }


def _dtype(path: Path, name: str, kind: str) -> torch.dtype:
    if kind not in DTYPES:
        raise CheckpointError(f"{path}: {name} is of type {kind}, which torch does not have")
    return DTYPES[kind]


class TensorFile:
    """A file to be written: the places of tensors in it, which all ranks compute alike."""

    def __init__(self, tensors: Mapping[str, Writable], metadata: Mapping[str, str] | None = None) -> None:
        self._tensors = tensors
        # Wide types first, so that each begins at a multiple of its size.
        order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
        self._starts: dict[str, int] = {}
        described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name in order:
            tensor = tensors[name]
            if tensor.dtype not in _NAMES:
                raise CheckpointError(f"{name} is {tensor.dtype}, which a safetensors file cannot hold")
            size = tensor.shape.numel() * tensor.dtype.itemsize
            described[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + size],
            }
            self._starts[name] = end
            end += size
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self._header) + end

    @property
    def is_sharded(self) -> bool:
        """Whether ranks other than 0 hold a part of it."""
        tensors = self._tensors.values()
        return any(isinstance(one, SlicedTensor) or own_rows(one) is not None for one in tensors)

    def create(self, path: Path, is_there: bool = False) -> None:
        """Write the header, and make the file as long as it will be; rank 0 alone calls this.

        If `is_there`, a file of this size is written over.
        """
        with path.open("r+b" if is_there else "xb") as file:
            file.write(self._header)
            file.flush()
            if not is_there:
                reserve_blocks(file.fileno(), self.nbytes)
                file.truncate(self.nbytes)

    def fill(self, path: Path, is_main: bool, gathers: bool = False, flushes: bool = False) -> None:
        """Write what this rank holds; with `gathers`, rank 0 writes everything, and the others take part.

        All ranks call this. Rank 0 writes what all of them hold alike. A rank that cannot write still takes part in
        what others wait for, and raises at the end.
        """
        problem: Exception | None = None
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_WRONLY) if is_main or not gathers else -1
        except OSError as error:
            problem = error
        for name, tensor in self._tensors.items():
            part = self._part(tensor, is_main=is_main, gathers=gathers)
            try:
                if part is not None and problem is None:
                    _put(descriptor, part[0], len(self._header) + self._starts[name] + part[1])
            except Exception as error:  # also a device without memory for a copy
                problem = error
        if descriptor >= 0:
            problem = problem or _closed(descriptor, flushes)
        if problem is not None:
            raise problem

    def _part(self, tensor: Writable, *, is_main: bool, gathers: bool) -> tuple[torch.Tensor, int] | None:
        """What this rank writes of a tensor, and where its first byte goes."""
        if isinstance(tensor, StoredTensor):
            return (tensor.read(), 0) if is_main else None
        if isinstance(tensor, SlicedTensor):
            whole = tensor.part.join(tensor.local)
            return (whole, 0) if is_main else None
        rows = own_rows(tensor)
        if rows is None:
            return (tensor, 0) if is_main else None
        if gathers or not rows.is_range:
            # One tensor at a time is whole on each rank.
            whole = gathered(tensor)
            return (whole, 0) if is_main else None
        row_bytes = tensor.shape[1:].numel() * tensor.dtype.itemsize
        return (rows.values, rows.start * row_bytes) if rows.is_first else None

    def write(self, path: Path) -> None:
        """Write all of it, by a process alone."""
        self.create(path)
        self.fill(path, is_main=True)


def reserve_blocks(descriptor: int, num_bytes: int) -> None:
    """Reserve the space of a file on the disk: filling it is faster then, and a full disk is known before."""
    try:
        reserve = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):  # not Linux
        return
    # Not os.posix_fallocate: where the file system cannot reserve, it writes to every block.
    reserve.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if reserve(descriptor, 0, 0, num_bytes) != 0 and (number := ctypes.get_errno()) in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(number, os.strerror(number))


def _closed(descriptor: int, flushes: bool) -> OSError | None:
    """Close a file; what went wrong."""
    try:
        if flushes:
            os.fsync(descriptor)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)
    return None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _put(descriptor: int, values: torch.Tensor, position: int) -> None:
    if not values.numel():
        return
    flat = values.detach().resolve_conj().contiguous().cpu()
    plain = torch.view_as_real(flat) if flat.is_complex() else flat
    data = _bytes_of(plain)
    for start in range(0, len(data), WRITE_BYTES):
        part = data[start : start + WRITE_BYTES]
        while part:
            done = os.pwrite(descriptor, part, position)
            part, position = part[done:], position + done
