"""Memory that the processes of one machine share, and how they meet in it.

The first process makes it, with no name in any folder; the others open it through /proc, and then nobody keeps it
open. So it is gone with the last process that has it mapped, however that one ends, and /dev/shm has no part in it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evenstep.worker.comm.peers import Peers, started_at

Gather = Callable[[Any], list[Any]]
"""A value that JSON can hold, of every process, in the order of ranks."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Shared:
    """The memory, as one process has it."""

    memory: torch.Tensor
    """All of it, as bytes; unmapped with the last tensor that looks at it."""
    rank: int
    peers: Peers

    @property
    def size(self) -> int:
        """How many processes have it."""
        return self.peers.size

    def counters(self, num: int) -> memoryview:
        """The first so many numbers of 8 bytes; looking at one takes less than a tenth of a microsecond."""
        return self.memory[: 8 * num].numpy().data.cast("q")


def share(gather: Gather, rank: int, num_bytes: int) -> Shared | None:
    """Memory of so many bytes for all processes that gather; None for all of them if one cannot have it."""
    mine = _introduced()
    file = -1
    if rank == 0 and mine:
        with suppress(OSError):
            file, mine["name"] = _made(num_bytes)
    try:
        everyone = gather({**mine, "file": file})
        memory = _opened(everyone, rank, file, num_bytes)
        if not all(gather(memory is not None)) or memory is None:
            return None
        return Shared(memory, rank, Peers.of(everyone, rank))
    finally:
        if file >= 0:
            os.close(file)


def _introduced() -> dict[str, Any]:
    """Who this process is to others of the machine; nothing if it cannot share."""
    if not hasattr(os, "memfd_create") or not _BOOT.exists():
        return {}
    return {"boot": _BOOT.read_text().strip(), "pid": os.getpid(), "started": started_at(os.getpid())}


def _made(num_bytes: int) -> tuple[int, str]:
    name = f"evenstep-{secrets.token_hex(16)}"
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        # All of it now: memory that is not there when it is written would be a SIGBUS, in mid-training.
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.close(file)
        raise
    return file, name


def _opened(everyone: list[Mapping[str, Any]], rank: int, file: int, num_bytes: int) -> torch.Tensor | None:
    first = everyone[0]
    if first["file"] < 0 or any(one.get("boot") != first["boot"] for one in everyone):
        return None
    path = f"/proc/{first['pid']}/fd/{first['file']}" if rank else f"/proc/self/fd/{file}"
    try:
        # In another namespace that number is another process, whose files are not to be touched.
        if not os.readlink(path).startswith(f"/memfd:{first['name']}"):
            return None
        # Python's own mmap would keep the file open.
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
