"""What the control group of this process allows it: containers and clusters limit with it, unseen by `nproc`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
