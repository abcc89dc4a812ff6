"""Shared memory between the processes of one machine, and waiting for each other in it.

The first process creates an anonymous file (memfd); the others open it through /proc, and then all close it. The memory
is freed with the last process that has it mapped, however that process ends. /dev/shm is not used.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from evenstep.distributed.devices import num_cores
from evenstep.errors import RankLost, TrainingError

SPINS = 300
"""Checks before the core is yielded; about 50 microseconds."""
YIELD_SECONDS = 0.0002
SLEEP_PART = 1 / 16
"""The sleep before the next check, as a fraction of the time waited so far."""
LONGEST_SLEEP = 0.005
LOOK_SECONDS = 0.05
LONGEST_WAIT = timedelta(minutes=30)
"""The default timeout of torch's own collectives."""


@dataclass(frozen=True)
class Peers:
    """All processes that share the memory, including this one."""

    pids: Sequence[int]
    started: Sequence[str]
    rank: int
    may_spin: bool

    @classmethod
    def of(cls, everyone: Sequence[Mapping[str, Any]], rank: int) -> Peers:
        """From what each process gathered about itself."""
        pids = [int(one["pid"]) for one in everyone]
        # With more processes than cores, a spinning process would keep the awaited one off its core.
        return cls(pids, [one["started"] for one in everyone], rank, len(pids) <= num_cores())

    @property
    def size(self) -> int:
        return len(self.pids)

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Wait until `is_there()`; meanwhile Python handles signals, and a process that has ended is detected."""
        if self.may_spin:
            for _ in range(SPINS):
                if is_there():
                    return
        began = time.perf_counter()
        looked = began
        while not is_there():
            now = time.perf_counter()
            waited = now - began
            _rest(waited)
            if now - looked > LOOK_SECONDS:
                looked = now
                # What it posted before it ended counts.
                lost = self.lost()
                if is_there():
                    return
                self.judge(lost, waited)

    def judge(self, lost: Sequence[int], waited: float) -> None:
        """Raise if a rank has ended, or after the timeout."""
        if lost:
            raise RankLost(
                f"rank {lost[0]} ended while this one waited for it: if it left a report, the cause is there"
            )
        if waited > LONGEST_WAIT.total_seconds():
            raise TrainingError(
                f"waited for {waited:.0f} s for another rank, which is stuck, or took another path (a step "
                "more or less, a backward under `if rank == 0`)"
            )

    def lost(self) -> list[int]:
        """The ranks that have ended."""
        return [
            rank
            for rank, (pid, started) in enumerate(zip(self.pids, self.started, strict=True))
            if rank != self.rank and started_at(pid) != started
        ]


def started_at(pid: int) -> str:
    """When a process started, as the kernel writes it; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _rest(waited: float) -> None:
    """Yield the core, for longer the longer this process has waited."""
    if waited < YIELD_SECONDS:
        os.sched_yield()
    else:
        time.sleep(min(LONGEST_SLEEP, waited * SLEEP_PART))


Gather = Callable[[Any], list[Any]]
"""Gathers a JSON value from every process, in rank order."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Shared:
    """One process's mapping of the memory."""

    memory: torch.Tensor
    """All of it, as bytes; unmapped with the last tensor that views it."""
    rank: int
    peers: Peers

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.peers.size

    def counters(self, num: int) -> memoryview:
        """The first `num` 64-bit integers; reading one takes less than a tenth of a microsecond."""
        return self.memory[: 8 * num].numpy().data.cast("q")


def share(gather: Gather, rank: int, num_bytes: int) -> Shared | None:
    """Map `num_bytes` of memory in all processes that gather; None in all of them if one cannot."""
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
    """How other processes of this machine identify this one; empty if it cannot share memory."""
    if not hasattr(os, "memfd_create") or not _BOOT.exists():
        return {}
    return {"boot": _BOOT.read_text().strip(), "pid": os.getpid(), "started": started_at(os.getpid())}


def _made(num_bytes: int) -> tuple[int, str]:
    name = f"evenstep-{secrets.token_hex(16)}"
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        # Allocate all of it now: memory that is missing when it is written would be a SIGBUS during training.
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
        # In another PID namespace that number is another process, whose files must not be opened.
        if not os.readlink(path).startswith(f"/memfd:{first['name']}"):
            return None
        # Python's mmap would keep the file open.
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
