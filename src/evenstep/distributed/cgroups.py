"""What the control group of this process allows it: containers and clusters limit with it, unseen by `nproc`.

Whether a process that was killed ran out of memory: what the kernel counts, and what was left.
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
"""Version 1 writes a number as large as this for "no limit"."""
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The limit, what is used of it, and the line of memory.stat with what is given back when it is needed."""


@dataclass(frozen=True)
class Groups:
    """Where Linux keeps control groups, of both versions."""

    membership: Path = Path("/proc/self/cgroup")
    root: Path = Path("/sys/fs/cgroup")

    def cpu_quota(self) -> float | None:
        """Cores' worth of time that this process and its neighbours in the group get; None: no limit."""
        limits = [quota for folder in self._folders("cpu") if (quota := _cpu_limit(folder)) is not None]
        return min(limits, default=None)

    def memory_limit(self) -> tuple[int, int] | None:
        """Bytes allowed, and bytes used (files that are kept in memory for later apart); None: no limit."""
        limits = [limit for folder in self._folders("memory") if (limit := _memory_limit(folder)) is not None]
        return min(limits, default=None, key=lambda limit: limit[0] - limit[1])

    def _folders(self, controller: str) -> Iterator[Path]:
        """The group's folder and those above it: a limit of any of them holds."""
        for line in _read(self.membership).splitlines():
            _, names, path = (*line.split(":", 2), "", "")[:3]
            if names and controller not in names.split(","):
                continue
            # In a container the path is the host's, and its own group is mounted at the root.
            top = self.root / names if names and (self.root / names).is_dir() else self.root
            top = top if not names or top != self.root else self.root / controller
            inner = top / path.strip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top))


@cache
def own_quota() -> float | None:
    """The quota of this very process, read once."""
    return Groups().cpu_quota()


def _cpu_limit(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _memory_limit(folder: Path) -> tuple[int, int] | None:
    for limit_name, used_name, cached_name in MEMORY_FILES:
        limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
        if limit.isdigit() and int(limit) < NO_LIMIT:
            return int(limit), max(0, int(used) - _counted(folder, cached_name)) if used.isdigit() else 0
    return None


def _counted(folder: Path, name: str) -> int:
    """A line of memory.stat, in bytes."""
    lines = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    number = lines.get(name, "").strip()
    return int(number) if number.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


GROUPS = Path("/sys/fs/cgroup")
EVERY_SECONDS = 0.5
REMEMBERED = 20
"""Looks, which is ten seconds."""
NEARLY_FULL = 0.03


class MemoryWatch:
    """Remembers how often the kernel has killed for memory in the groups of these processes, and how full it was."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids
        self._seen: deque[Seen] = deque(maxlen=REMEMBERED)
        self._looked = 0.0
        self.look()

    def look(self) -> None:
        """Look again, at most twice a second."""
        now = time.monotonic()
        if now - self._looked < EVERY_SECONDS:
            return
        self._looked = now
        memory = psutil.virtual_memory()
        kills = {file: _count(file) for pid in self._pids.values() for file in _counters(pid)}
        self._seen.append(Seen(memory.available / memory.total, kills))

    def evidence(self) -> str:
        """Why it must have been memory, or nothing; what happened long ago is no evidence."""
        before: dict[Path, int] = {}
        for seen in reversed(self._seen):
            before |= seen.kills
        for file, count in before.items():
            if _count(file) > count:
                return f"The kernel killed it: its limit of memory{_limit(file)} was reached."
        least = min((seen.free for seen in self._seen), default=1.0)
        return f"The machine's memory was full: {least:.1%} of it was left." if least < NEARLY_FULL else ""


@dataclass(frozen=True)
class Seen:
    """One look."""

    free: float
    kills: dict[Path, int]


def _counters(pid: int) -> list[Path]:
    """The files that count kills for memory in a process's control group, whosever limit was reached."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, names, path = line.split(":", 2)
        root, name = (GROUPS, "memory.events") if not names else (GROUPS / names, "memory.oom_control")
        if not names or "memory" in names.split(","):
            group = root / path.strip("/")
            files.append(group / name)
    return [file for file in files if file.is_file()]


def _count(file: Path) -> int:
    try:
        words = file.read_text().split()
    except OSError:
        return 0
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _limit(counter: Path) -> str:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (counter.parent / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return f" ({int(text) / 2**20:,.0f} MiB)"
    return ""
