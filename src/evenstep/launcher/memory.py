"""Whether a process that was killed ran out of memory: what the kernel counts, and what was left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

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
