"""Linux control groups: the CPU and memory limits of a process, and whether the kernel killed one for its memory.

Containers and clusters limit a job through its control group, and neither `nproc` nor `free` shows that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

NO_LIMIT = 2**60
"""Version 1 writes a number at least as large as this for "no limit"."""
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The limit, what is used of it, and the line of memory.stat that counts reclaimable file cache; version 2, then 1."""
KILL_COUNTERS = ("memory.events", "memory.oom_control")
CHECK_SECONDS = 0.5
NUM_REMEMBERED = 20
"""Readings that are kept: those of the last ten seconds."""
NEARLY_FULL = 0.03
"""The fraction of free memory below which the machine counts as full."""


@dataclass(frozen=True)
class Groups:
    """The control groups of a process, version 1 or 2."""

    membership: Path = Path("/proc/self/cgroup")
    root: Path = Path("/sys/fs/cgroup")

    def cpu_quota(self) -> float | None:
        """Cores' worth of CPU time that the processes of the group share; None: no limit."""
        limits = [quota for folder in self._folders("cpu") if (quota := _cpu_limit(folder)) is not None]
        return min(limits, default=None)

    def memory_limit(self) -> tuple[int, int] | None:
        """Bytes allowed and bytes used, without reclaimable file cache; None: no limit."""
        limits = [limit for folder in self._folders("memory") if (limit := _memory_limit(folder)) is not None]
        return min(limits, default=None, key=lambda limit: limit[0] - limit[1])

    def kill_counter(self) -> Path | None:
        """The file in which the kernel counts the out-of-memory kills of the group, whichever limit was reached."""
        files = (folder / name for folder in self._folders("memory") for name in KILL_COUNTERS)
        return next((file for file in files if file.is_file()), None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """The group's folder and its parents, whose limits also apply."""
        for line in _read(self.membership).splitlines():
            _, names, path = (*line.split(":", 2), "", "")[:3]
            if names and controller not in names.split(","):
                continue
            # In a container the path is the host's, and the container's own group is mounted at the root.
            top = self.root / names if names and (self.root / names).is_dir() else self.root
            top = top if not names or top != self.root else self.root / controller
            inner = top / path.strip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top))


@cache
def own_quota() -> float | None:
    """The CPU quota of this process, read once."""
    return Groups().cpu_quota()


class MemoryWatch:
    """Watches free memory and the out-of-memory kills in the control groups of these processes."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids
        self._readings: deque[MemoryReading] = deque(maxlen=NUM_REMEMBERED)
        self._read_at = 0.0
        self.update()

    def update(self) -> None:
        """Take a reading, at most twice a second."""
        now = time.monotonic()
        if now - self._read_at < CHECK_SECONDS:
            return
        self._read_at = now
        memory = psutil.virtual_memory()
        groups = [Groups(membership=Path(f"/proc/{pid}/cgroup")) for pid in self._pids.values()]
        kills = {file: _num_kills(file) for group in groups if (file := group.kill_counter()) is not None}
        self._readings.append(MemoryReading(memory.available / memory.total, kills))

    def evidence(self) -> str:
        """A sentence that says why a process was killed for its memory; empty if the last ten seconds show no sign."""
        before: dict[Path, int] = {}
        for reading in reversed(self._readings):
            before |= reading.kills
        for file, num in before.items():
            if _num_kills(file) > num:
                limit = _memory_limit(file.parent)
                shown = f" ({limit[0] / 2**20:,.0f} MiB)" if limit else ""
                return f"The kernel killed it: its memory limit{shown} was reached."
        least = min((reading.free for reading in self._readings), default=1.0)
        return f"The machine's memory was full: {least:.1%} of it was left." if least < NEARLY_FULL else ""


@dataclass(frozen=True)
class MemoryReading:
    """The fraction of the machine's memory that is free, and the number of kills that each counter shows."""

    free: float
    kills: dict[Path, int]


def _cpu_limit(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _memory_limit(folder: Path) -> tuple[int, int] | None:
    for limit_name, used_name, cached_name in MEMORY_FILES:
        limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
        if limit.isdigit() and int(limit) < NO_LIMIT:
            cached = _counter(folder / "memory.stat", cached_name)
            return int(limit), max(0, int(used) - cached) if used.isdigit() else 0
    return None


def _num_kills(file: Path) -> int:
    return _counter(file, "oom_kill")


def _counter(file: Path, name: str) -> int:
    """One line of a file of `name number` lines; 0 if it is not there."""
    lines = dict(line.split(" ", 1) for line in _read(file).splitlines() if " " in line)
    number = lines.get(name, "").strip()
    return int(number) if number.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
