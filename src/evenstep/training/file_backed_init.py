"""Building a model that is larger than the memory of a process: its large tensors lie in a file while it is built.

A sharded model is whole only once, when the task makes it; from then on a rank holds its shards. On the meta device a
model has no values, and these would have to be drawn again, layer by layer, in another order than the task's own code
draws them: another model than on one device. So the task's code runs as it is, and what it allocates is mapped from a
file without a name, whose pages the kernel writes to the disk when memory is short. Rank 0's values are those that
count: the other ranks, which get them sent unit by unit, map all large tensors to the same pages, and read nothing
from them.

That would be wrong if a model kept a tensor that is neither a parameter nor a buffer, or a number that was computed
from values that are not there (`self.scale = float(weight.std())`), or if its code failed for them. Then such a rank
builds the model a second time, with the values, in a file of its own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import TypeIs

from evenstep.distributed.world import World
from evenstep.errors import EvenstepError
from evenstep.private_apis import TorchDispatchMode, tree_leaves, written_arguments
from evenstep.sampling.rng import restore_rng_states, rng_states

LARGE = 2**22
"""Bytes of a tensor that is kept in a file."""
DONTNEED = 4
"""MADV_DONTNEED of Linux: pages of a shared mapping are dropped from this process, and stay in the file."""


def build(make: Callable[[], nn.Module], world: World, folder: Path) -> nn.Module:
    """What `make` returns, with large tensors in a file below `folder`; on other ranks than 0, without their values."""
    if world.is_main:
        return _built(make, FileBacked(folder))
    before = rng_states()
    mode = FileBacked(folder, is_scratch=True)
    try:
        module = _built(make, mode)
    except EvenstepError:
        raise
    except Exception:
        module = None
    if module is not None and not mode.is_read and not any(map(mode.has, strays(module))):
        return module
    del module
    restore_rng_states(before)
    return _built(make, FileBacked(folder))


def _built(make: Callable[[], nn.Module], mode: FileBacked) -> nn.Module:
    with mode:
        return make()


def strays(module: nn.Module) -> Iterator[torch.Tensor]:
    """All tensors of this process that are neither parameters nor buffers of the module."""
    known = {_storage_of(one) for one in (*module.parameters(), *module.buffers()) if _has_storage(one)}
    yield from (one for one in gc.get_objects() if _has_storage(one) and _storage_of(one) not in known)


class FileBacked(TorchDispatchMode):
    """Inside, large tensors on the CPU are mapped from a file; with `is_scratch`, all of them from the same pages."""

    def __init__(self, folder: Path, is_scratch: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder, self._is_scratch = folder, is_scratch
        self._mapped: dict[StorageWeakRef, int] = {}
        """Sizes. Not by address: that of a tensor which is freed may be given to another one."""
        self._computed: set[StorageWeakRef] = set()
        """Small tensors that were computed from those without values."""
        self.is_read = False
        """Whether code has got a number that was computed from tensors without values."""
        self._scratch: Path | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether its values lie in a mapping, or with `is_scratch` depend on what does."""
        storage = _storage_of(tensor)
        return storage in self._mapped or storage in self._computed

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._scratch is not None:
            self._scratch.unlink()
            self._scratch = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if _has_storage(one)]
        large = {_storage_of(one) for one in given if _is_large(one)}
        if _is_large(result) and _storage_of(result) not in large | self._mapped.keys():
            result = self._moved(result, is_empty="empty" in func.__name__)
            self._release([result])
        self._release(given)
        if self._is_scratch and any(map(self.has, given)):
            self._follow(tree_leaves((result, written_arguments(func, args))))
        return result

    def _follow(self, results: Iterable[Any]) -> None:
        """Note what was computed from tensors without values."""
        for one in results:
            if _has_storage(one) and _storage_of(one) not in self._mapped:
                self._computed.add(_storage_of(one))
            self.is_read = self.is_read or isinstance(one, int | float | complex)

    def _moved(self, tensor: torch.Tensor, is_empty: bool) -> torch.Tensor:
        storage = self._storage(tensor.untyped_storage().nbytes())
        made = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if not is_empty and not self._is_scratch:
            made.copy_(tensor)
        return made

    def _storage(self, num_bytes: int) -> Any:
        path = self._scratch or self._new_file()
        found: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=num_bytes)
        if self._is_scratch:
            self._scratch = path
        else:
            # It has no name from here on: nothing is left of a process that is killed.
            path.unlink()
        self._mapped[StorageWeakRef(found)] = num_bytes
        return found

    def _new_file(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".building-", dir=self._folder)
        os.close(descriptor)
        return Path(name)

    def _release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Pages count as memory of this process as long as it maps them; the kernel keeps them in its own."""
        for one in tensors:
            size = self._mapped.get(_storage_of(one)) if _is_large(one) else None
            if size is not None:
                address = one.untyped_storage().data_ptr()
                _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), DONTNEED)


def _has_storage(value: Any) -> TypeIs[torch.Tensor]:
    return type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided


def _is_large(value: Any) -> bool:
    return _has_storage(value) and value.device.type == "cpu" and value.untyped_storage().nbytes() >= LARGE


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _libc() -> Any:
    return ctypes.CDLL(None)
