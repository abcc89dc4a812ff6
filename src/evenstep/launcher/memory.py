"""Whether a process that was killed ran out of memory: what the kernel counts, and what was left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
EVERY_SECONDS = 0.5
NEARLY_FULL = 0.03


class MemoryWatch:
    """Remembers how often the kernel has killed for memory in the groups of these processes, and how full it was."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids
        self._kills: dict[Path, int] = {}
        self._looked = 0.0
        self._lowest = 1.0
        self.look()

    def look(self) -> None:
        """Look again, at most twice a second."""
        now = time.monotonic()
        if now - self._looked < EVERY_SECONDS:
            return
        self._looked = now
        memory = psutil.virtual_memory()
        self._lowest = min(self._lowest, memory.available / memory.total)
        for pid in self._pids.values():
            for file in _counters(pid):
                self._kills.setdefault(file, _count(file))

    def evidence(self) -> str:
        """Why it must have been memory, or nothing."""
        for file, before in self._kills.items():
            if _count(file) > before:
                return f"The kernel killed it: its limit of memory{_limit(file)} was reached."
        if self._lowest < NEARLY_FULL:
            return f"The machine's memory was full: {self._lowest:.1%} of it was left."
        return ""


def _counters(pid: int) -> list[Path]:
    """The files that count kills for memory in a process's control group, and in those above it."""
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
            files += [one / name for one in (group, *group.parents) if one.is_relative_to(GROUPS)]
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
