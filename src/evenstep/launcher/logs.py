"""What the ranks print, as one voice: rank 0 speaks, the others only warn, and what all of them say is said once."""

from __future__ import annotations

import codecs
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from evenstep.launcher.processes import RankLogs
from evenstep.report.progress import pass_on, without_control

HELD_SECONDS = 0.25
"""How long a warning waits for the same one from other ranks."""
_GRAVE = re.compile(r"warn|error|critical|fatal|exception|traceback|assert|abort", re.IGNORECASE)
LIKE_A_PREFIX = re.compile(r"\s*\[ranks? \d")
MOST_KNOWN = 1000


@dataclass
class Said:
    """A line that was heard, and not yet passed on."""

    text: str
    since: float
    ranks: list[int] = field(default_factory=list)
    count: int = 0

    def line(self) -> str:
        """With a prefix if it is not rank 0's alone; a rank 0 that writes one itself gets its own before it."""
        text = without_control(self.text)
        ranks = sorted(set(self.ranks))
        times = self.count // len(ranks)
        again = f" (x{times})" if times > 1 else ""
        if ranks == [0] and not LIKE_A_PREFIX.match(text):
            return f"{text}{again}"
        return f"[{ranks_in_words(ranks)}] {text}{again}"


class Voices:
    """Reads the logs of the ranks on this machine while they grow."""

    def __init__(self, logs: RankLogs, num: int, passes_rank_0_on: bool = False) -> None:
        self._logs = logs
        self._passes_on = passes_rank_0_on
        self._tails = {
            (local, ending): Tail(logs.path(local, ending)) for local in range(num) for ending in ("out", "err")
        }
        self._held: dict[str, Said] = {}
        self._known: dict[str, int] = {}

    def new(self, is_end: bool = False) -> Iterator[str]:
        """Lines to show now."""
        now = time.monotonic()
        for (local, ending), tail in self._tails.items():
            rank = self._logs.first_rank + local
            if rank == 0 and self._passes_on:
                pass_on(tail.raw(), sys.stdout if ending == "out" else sys.stderr)
                continue
            for text in tail.new():
                if ending == "out" and rank == 0:
                    yield Said(text, now, [0], 1).line()
                elif ending == "err" and (rank == 0 or _GRAVE.search(text)):
                    self._hold(text, rank, now)
        yield from self._released(now, is_end)

    def _hold(self, text: str, rank: int, now: float) -> None:
        said = self._held.setdefault(text, Said(text, now))
        said.ranks.append(rank)
        said.count += 1

    def _released(self, now: float, is_end: bool) -> Iterator[str]:
        for text, said in list(self._held.items()):
            if not is_end and now - said.since < HELD_SECONDS:
                continue
            before = self._known.get(text, 0)
            # What is said again and again is shown the first time, and then with its count at 10, 100, 1000.
            if not before:
                yield said.line()
            elif len(str(before + said.count)) > len(str(before)):
                yield f"{said.line()} (x{before + said.count} so far)"
            if len(self._known) < MOST_KNOWN:
                self._known[text] = before + said.count
            del self._held[text]


class Tail:
    """The new lines of a log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def raw(self) -> str:
        """All that was written since the last call."""
        if not self._path.exists() or self._path.stat().st_size <= self._at:
            return ""
        with self._path.open("rb") as file:
            file.seek(self._at)
            # A letter of several bytes may be written in halves.
            text = self._decoder.decode(file.read())
            self._at = file.tell()
        return text

    def new(self) -> list[str]:
        """Whole lines that were written since the last call; of one that was written over, what it showed last."""
        if not self._path.exists() or self._path.stat().st_size <= self._at:
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        lines = whole.decode(errors="replace").split("\n") if newline else []
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines]


def ranks_in_words(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    parts: list[str] = []
    for rank in sorted(ranks):
        first, _, last = (parts[-1] if parts else "").partition("-")
        if parts and int(last or first) == rank - 1:
            parts[-1] = f"{first}-{rank}"
        else:
            parts.append(str(rank))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"
