"""A race of steps on one device: entering racers, comparing what they learned, blocks by turns, and the table.

A racer that raises is named with its error and the others go on. Every racer takes the same first steps, from the same
weights on the same batches in the same order; one whose loss on a fixed batch then differs from that of the first racer
by more than 10 % of what the first one unlearned (0.05 at least) is not in the race.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import harness
import torch
from gpu_racers import Racer, synchronize
from gpu_works import Work

TOLERANCE = 0.1
LEAST_TOLERANCE = 0.05
MOST_BLOCK_SECONDS = 0.3
LEAST_STEPS, MOST_STEPS = 4, 5000
TRIAL_SECONDS = 0.05
SETTLE_STEPS = 2
"""Before the clock of every block: Lightning's end empties the allocator's cache, and the next one would pay."""


@dataclass
class Entry:
    """A racer, and what is known of it."""

    racer: Racer
    start_seconds: float
    """What its first steps took beyond as many later ones: compiling and capturing; building it is not in it."""
    loss_after: float
    peak_bytes: int
    """Beyond what the racers before it hold."""
    step_seconds: float = 0.0
    """Of a short trial; for the length of a block."""
    figures: list[float] = field(default_factory=list)
    """Milliseconds a step, one for each round of the last race."""


@dataclass(frozen=True)
class Goal:
    """What was promised, and what came."""

    text: str
    wanted: float
    got: harness.Ratio
    is_least: bool = True

    @property
    def is_met(self) -> bool:
        return self.got.ratio >= self.wanted if self.is_least else self.got.ratio <= self.wanted

    def line(self) -> str:
        word = "at least" if self.is_least else "at most"
        verdict = "met" if self.is_met else "MISSED"
        return f"{verdict}: {self.text}: {word} {self.wanted:g} x, got {self.got.ratio:.3f} ({self.got.interval})"

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "wanted": self.wanted,
            "is_least": self.is_least,
            "is_met": self.is_met,
            **self.got.figures("ms"),
        }


class Field:
    """Those who race on one piece of work."""

    def __init__(self, work: Work, rounds: int, seconds: float) -> None:
        self.work = work
        self.entries: dict[str, Entry] = {}
        self.absent: dict[str, str] = {}
        self._rounds = rounds
        self._seconds = seconds
        self._start_loss = work.probe(work.network().to(work.device))
        self._reference: float | None = None

    def enter(self, name: str, make: Callable[[], Racer], is_checked: bool = True) -> None:
        """Make a racer, take its first steps, and compare what it learned; absent if it raises."""
        print(f"    {name} ...", flush=True)
        racer = None
        try:
            free()
            before = self._allocated(reset=True)
            racer = make()
            entry = self._warmed(racer, before)
            if is_checked:
                self._check(entry.loss_after)
            entry.step_seconds = self._trial(racer)
            entry.start_seconds = max(0.0, entry.start_seconds - self.work.check_steps * entry.step_seconds)
            self.entries[name] = entry
        except (Exception, SystemExit) as error:
            self._leave_out(name, error)
            if racer is not None:
                _close(racer)

    def race(self, names: list[str], again: Mapping[str, str]) -> None:
        """Blocks of the racers by turns; `again` runs some of them twice, under another name, as a control."""
        # Ratios are of one race: figures of an earlier one are in its report.
        self.entries = {name: entry for name, entry in self.entries.items() if name not in again}
        for entry in self.entries.values():
            entry.figures = []
        blocks: dict[str, harness.Block] = {}
        present = [name for name in names if name in self.entries]
        labels = present + [label for label, name in again.items() if name in self.entries]
        if not labels:
            return
        seconds = min(MOST_BLOCK_SECONDS, self._seconds / (self._rounds * len(labels)))
        for label in labels:
            entry = self.entries[again.get(label, label)]
            num = max(LEAST_STEPS, min(MOST_STEPS, round(seconds / max(entry.step_seconds, 1e-7))))
            blocks[label] = lambda label=label, entry=entry, num=num: self._block(label, entry, num)  # type: ignore[misc]
        for label, figures in harness.interleaved(blocks, self._rounds).items():
            if label in again and again[label] in self.entries and label not in self.absent:
                self.entries[label] = Entry(**{**self.entries[again[label]].__dict__, "figures": figures})
            elif label in self.entries:
                self.entries[label].figures = figures

    def pool(self, name: str, of: list[str]) -> None:
        """Enter the mean of some as one more, after the race; if one of them is absent, nothing."""
        if all(self._has_raced(one) for one in of):
            figures = [statistics.mean(at) for at in zip(*(self.entries[one].figures for one in of), strict=True)]
            self.entries[name] = Entry(**{**self.entries[of[0]].__dict__, "figures": figures})

    def compared(self, first: str, second: str) -> harness.Ratio | None:
        """Milliseconds of second / first; None if one is not in the race."""
        if not self._has_raced(first) or not self._has_raced(second):
            return None
        return harness.compared(self.entries[first].figures, self.entries[second].figures)

    def best(self, names: list[str]) -> str | None:
        """The fastest of some."""
        raced = [name for name in names if self._has_raced(name)]
        return min(raced, key=lambda name: statistics.median(self.entries[name].figures)) if raced else None

    def goal(self, text: str, wanted: float, first: str, second: str | None, is_least: bool = True) -> Goal | str:
        """Judge second / first, or say why that cannot be."""
        ratio = self.compared(first, second) if second is not None else None
        return Goal(text, wanted, ratio, is_least) if ratio is not None else f"not judged: {text} ({first}, {second})"

    def ms(self, name: str) -> float:
        return statistics.median(self.entries[name].figures)

    def to_json(self, against: str) -> dict[str, Any]:
        """All figures; the ratios are this / `against`."""
        rows: dict[str, Any] = {}
        for name, entry in self.entries.items():
            ratio = self.compared(against, name)
            rows[name] = {
                "ms": self.ms(name) if entry.figures else None,
                "figures_ms": entry.figures,
                "start_seconds": entry.start_seconds,
                "loss_after": entry.loss_after,
                "peak_bytes": entry.peak_bytes,
                f"ratio to {against}": asdict(ratio) if ratio is not None else None,
            }
        checked = {"steps": self.work.check_steps, "start_loss": self._start_loss, "tolerance": self._tolerance()}
        return {"work": self.work.name, "rounds": self._rounds, "check": checked, "rows": rows, "absent": self.absent}

    def rows(self, names: list[str], against: str) -> list[tuple[str, ...]]:
        """Rows for a table: racer, ms, / `against`, interval, loss, peak, start; the absent at the end."""
        rows: list[tuple[str, ...]] = []
        for name in names:
            if not self._has_raced(name):
                continue
            entry, ratio = self.entries[name], self.compared(against, name)
            rows.append(
                (
                    name,
                    f"{self.ms(name):.3f}",
                    f"{ratio.ratio:.3f}" if ratio else "",
                    ratio.interval if ratio else "",
                    f"{entry.loss_after:.3f}",
                    f"{entry.peak_bytes / 2**20:,.0f}",
                    f"{entry.start_seconds:.1f}",
                )
            )
        return rows + [
            (name, "absent", "", self.absent[name][:60], "", "", "") for name in names if name in self.absent
        ]

    def close(self) -> None:
        """Let go of everything on the card."""
        for entry in {id(entry.racer): entry for entry in self.entries.values()}.values():
            _close(entry.racer)
        self.entries.clear()
        torch._dynamo.reset()
        free()

    def _has_raced(self, name: str) -> bool:
        return name in self.entries and bool(self.entries[name].figures)

    def _warmed(self, racer: Racer, before: int) -> Entry:
        began = time.perf_counter()
        racer.advance(self.work.check_steps)
        synchronize(self.work.device)
        seconds = time.perf_counter() - began
        peak = self._allocated(reset=False) - before
        return Entry(racer, seconds, racer.probe(), peak)

    def _check(self, loss: float) -> None:
        if self._reference is None:
            self._reference = loss
        # Not <=: NaN learned nothing.
        if not abs(loss - self._reference) <= self._tolerance():
            raise ValueError(f"learned something else: loss {loss:.4f}, not {self._reference:.4f}")

    def _tolerance(self) -> float:
        unlearned = self._start_loss - (self._reference if self._reference is not None else self._start_loss)
        return max(LEAST_TOLERANCE, TOLERANCE * unlearned)

    def _trial(self, racer: Racer) -> float:
        """Seconds of a step, about."""
        num = 2
        while True:
            seconds = self._seconds_of(racer, num)
            if seconds > TRIAL_SECONDS or num >= MOST_STEPS:
                return seconds / num
            num *= 4

    def _seconds_of(self, racer: Racer, num: int) -> float:
        if racer.seconds_of is not None:
            return racer.seconds_of(num)
        synchronize(self.work.device)
        began = time.perf_counter()
        racer.advance(num)
        synchronize(self.work.device)
        return time.perf_counter() - began

    def _block(self, label: str, entry: Entry, num: int) -> float:
        """Milliseconds a step; a racer that raises is out, and its figure is no longer used."""
        if label in self.absent:
            return 1.0
        try:
            if entry.racer.seconds_of is None:
                entry.racer.advance(SETTLE_STEPS)
            return self._seconds_of(entry.racer, num) / num * 1e3
        except (Exception, SystemExit) as error:
            self._leave_out(label, error)
            self.entries.pop(label, None)
            return 1.0

    def _leave_out(self, name: str, error: BaseException) -> None:
        said = (str(error).strip().splitlines() or [""])[0]
        self.absent[name] = f"{type(error).__name__}: {said}"
        print(f"    {name} is left out: {self.absent[name]}", flush=True)

    def _allocated(self, reset: bool) -> int:
        device = self.work.device
        if device.type != "cuda":
            return 0
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
            return torch.cuda.memory_allocated(device)
        return torch.cuda.max_memory_allocated(device)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _close(racer: Racer) -> None:
    try:
        racer.close()
    except Exception as error:
        print(f"    closing: {type(error).__name__}: {error}", flush=True)
