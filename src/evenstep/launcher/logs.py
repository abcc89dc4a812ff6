"""Merge what the ranks write: their logs into one stream while they run, their profiler traces into one at the end.

Of rank 0 every line is shown, of other ranks only warnings and errors; a line that several ranks print is shown once.
"""

from __future__ import annotations

import codecs
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from evenstep.errors import EvenstepError
from evenstep.launcher.processes import RankLogs
from evenstep.record import TRACE_INDEX, TRACES
from evenstep.report import trace
from evenstep.report.terminal import pass_on, without_control
from evenstep.report.trace import RankNumbers, RankTrace, merge
from evenstep.training.trainer import Event
from evenstep.typed_values import Natural, Schema

HELD_SECONDS = 0.25
"""How long a warning is held back, to be merged with the same one from other ranks."""
_SERIOUS = re.compile(r"warn|error|critical|fatal|exception|traceback|assert|abort", re.IGNORECASE)
RANK_PREFIX = re.compile(r"\s*\[ranks? \d")
MAX_KNOWN_LINES = 1000
SHOWN_BYTES = 2**20
"""Bytes of a log read at a time where each line is examined."""
PASSED_ON_BYTES = 2**23
"""Bytes of a log read at a time where it is passed through unchanged."""
MAX_UNREAD_BYTES = 2**22
"""More unread bytes than this are skipped: the log keeps them."""
MAX_LINE_BYTES = 2**14
"""Bytes of a line that are shown."""


@dataclass
class PendingLine:
    """A line that was read, and is not yet shown."""

    text: str
    since: float
    ranks: list[int] = field(default_factory=list)
    count: int = 0

    def line(self) -> str:
        """The text with a `[rank N]` prefix, unless only rank 0 printed it and it has no such prefix itself."""
        text = without_control(self.text)
        ranks = sorted(set(self.ranks))
        times = self.count // len(ranks)
        again = f" (x{times})" if times > 1 else ""
        if ranks == [0] and not RANK_PREFIX.match(text):
            return f"{text}{again}"
        return f"[{ranks_in_words(ranks)}] {text}{again}"


class MergedLogs:
    """The merged lines of all ranks on this machine, read while their logs grow."""

    def __init__(self, logs: RankLogs, num: int, passes_rank_0_on: bool = False) -> None:
        self._logs = logs
        self._passes_on = passes_rank_0_on
        self._tails = {
            (local, ending): Tail(logs.path(local, ending))
            for local in range(num)
            for ending in ("out", "err")
            # The stdout of other ranks is not shown.
            if ending == "err" or logs.first_rank + local == 0
        }
        self._held: dict[str, PendingLine] = {}
        self._known: dict[str, int] = {}

    def new(self, is_end: bool = False) -> Iterator[str]:
        """Lines to show now; at the end, all remaining ones."""
        most = max((tail.num_unread for tail in self._tails.values()), default=0) if is_end else 0
        # Counted beforehand: a process that a rank started may write forever.
        for _ in range(1 + most // SHOWN_BYTES):
            now = time.monotonic()
            for (local, ending), tail in self._tails.items():
                yield from self._new_lines(self._logs.first_rank + local, ending, tail, now)
            yield from self._due_lines(now, is_end)

    def _new_lines(self, rank: int, ending: str, tail: Tail, now: float) -> Iterator[str]:
        if rank == 0 and self._passes_on:
            pass_on(tail.raw(), sys.stdout if ending == "out" else sys.stderr)
            return
        was_whole = tail.is_whole
        lines = tail.new()
        if was_whole and not tail.is_whole:
            yield f"[rank {rank}] writes more than is shown here; the whole log is {tail.path}"
        for text in lines:
            if ending == "out":
                yield PendingLine(text, now, [0], 1).line()
            elif rank == 0 or _SERIOUS.search(text):
                self._hold(text, rank, now)

    def _hold(self, text: str, rank: int, now: float) -> None:
        pending = self._held.setdefault(text, PendingLine(text, now))
        pending.ranks.append(rank)
        pending.count += 1

    def _due_lines(self, now: float, is_end: bool) -> Iterator[str]:
        for text, pending in list(self._held.items()):
            if not is_end and now - pending.since < HELD_SECONDS:
                continue
            before = self._known.get(text, 0)
            # A repeated line is shown the first time, and then with its count at 10, 100, 1000.
            if not before:
                yield pending.line()
            elif len(str(before + pending.count)) > len(str(before)):
                yield f"{pending.line()} (x{before + pending.count} so far)"
            if len(self._known) < MAX_KNOWN_LINES:
                self._known[text] = before + pending.count
            del self._held[text]


class Tail:
    """The new lines of a log; each byte is read once, a bounded number at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = Line()
        self.is_whole = True
        """Whether nothing was skipped so far."""

    def raw(self) -> str:
        """The text written since the last call, or the next part of it."""
        # A multi-byte character may be split between two reads.
        return self._decoder.decode(self._read(PASSED_ON_BYTES))

    def new(self) -> list[str]:
        """Lines completed since the last call; if there are too many, only the last ones."""
        if self.num_unread > MAX_UNREAD_BYTES:
            self._skip()
        *ended, rest = self._read(SHOWN_BYTES).split(b"\n")
        lines = []
        for part in ended:
            self._line.add(part)
            lines.append(self._line.shown())
            self._line = Line()
        self._line.add(rest)
        return lines

    @property
    def num_unread(self) -> int:
        return max(0, self.path.stat().st_size - self._at) if self.path.exists() else 0

    def _read(self, most: int) -> bytes:
        if not self.num_unread:
            return b""
        with self.path.open("rb") as file:
            file.seek(self._at)
            part = file.read(most)
        self._at += len(part)
        return part

    def _skip(self) -> None:
        """Continue near the end, at the beginning of a line."""
        with self.path.open("rb") as file:
            file.seek(self._at + self.num_unread - SHOWN_BYTES)
            file.readline(SHOWN_BYTES)
            self._at = file.tell()
        self._line, self.is_whole = Line(), False


class Line:
    """A line while it is written: carriage returns overwrite it, and a long one is cut."""

    def __init__(self) -> None:
        self._kept = b""
        self._num_bytes = 0
        self._is_over = False
        """Whether the next byte overwrites the line; a carriage return right before the newline does not."""

    def add(self, part: bytes) -> None:
        body = part.rstrip(b"\r")
        if body:
            _, _, shown = body.rpartition(b"\r")
            if self._is_over or len(shown) < len(body):
                self._kept, self._num_bytes = b"", 0
            self._kept += shown[: MAX_LINE_BYTES - len(self._kept)]
            self._num_bytes += len(shown)
        self._is_over = len(body) < len(part) or (self._is_over and not body)

    def shown(self) -> str:
        more = self._num_bytes - len(self._kept)
        return self._kept.decode(errors="replace") + (f" ... ({more:,} bytes more)" if more else "")


def end_of(log: Path) -> str:
    """The last part of a log of any length."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - SHOWN_BYTES))
        return file.read(SHOWN_BYTES).decode(errors="replace")


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


@dataclass(frozen=True)
class _RankTraceFile:
    file: str
    machine: str
    steps: Natural = 0
    parts: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _TraceIndex:
    """The traces that the ranks wrote."""

    steps: tuple[Natural, Natural]
    ranks: dict[Natural, _RankTraceFile]


_TRACE_INDEX: Schema[_TraceIndex] = Schema(_TraceIndex, "list of traces")


def with_trace(events: Iterator[Event], folder: Path) -> Iterator[Event]:
    """The events, and at the end, also after a failure, where the trace is and what a step consists of."""
    try:
        yield from events
    except Exception:
        # Not during the training: the launcher cannot watch the ranks while it merges.
        yield from merged(folder)
        raise
    yield from merged(folder)


def merged(folder: Path) -> list[str]:
    """Merge the ranks' traces, if there are any, into one timeline; return lines about it. Never fails the training."""
    if not (folder / TRACES / TRACE_INDEX).exists():
        return []
    try:
        known = _TRACE_INDEX.read(folder / TRACES / TRACE_INDEX)
        ranks = [RankTrace(rank, folder / TRACES / one.file, one.machine) for rank, one in known.ranks.items()]
        path = folder / trace.FILE
        merge(ranks, path)
        found = [RankNumbers(rank=rank, steps=one.steps, parts=one.parts) for rank, one in known.ranks.items()]
        trace.write_numbers(found, folder / TRACES / trace.NUMBERS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EvenstepError) as error:
        return [f"warning: no trace was made ({type(error).__name__}: {error})"]
    first, last = known.steps
    where = f"trace of steps {first} to {last}: {path}; open it at https://ui.perfetto.dev or in chrome://tracing"
    return [where, *trace.lines(found)]
