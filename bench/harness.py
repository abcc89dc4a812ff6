"""What the benchmarks share: interleaved blocks, ratios with their intervals, tables, and a file with the machine.

A block is a function that runs once and returns its figure: milliseconds a step, or samples a second. Blocks are
interleaved A B B A in one process tree; a ratio is the median over the rounds with a bootstrap 95 % interval. A racer
raced against a second copy of itself is the control: no claim smaller than its spread.

A ratio in a table is always "ours is so many times as fast", so that above 1 is ahead. A goal is met when the lower end
of the interval reaches it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import evenstep
from evenstep.distributed.devices import facts
from evenstep.distributed.shm.native import load

Block = Callable[[], float]
Kind = Literal["ours", "peer", "limit", "control"]
NUM_DRAWS = 2000
PEERS = ("accelerate", "lightning", "pytorch-ignite")


@dataclass(frozen=True)
class Ratio:
    """Two medians, and second / first with its 95 % interval."""

    first: float
    second: float
    ratio: float
    low: float
    high: float

    @property
    def interval(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"

    def figures(self, unit: str) -> dict[str, float]:
        """As it is written to a file: `first_ms`, `second_ms`, `ratio`, `low`, `high`."""
        medians = {f"first_{unit}": self.first, f"second_{unit}": self.second}
        return {**medians, "ratio": self.ratio, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Entry:
    """How a racer is entered: what it is to us, how it is set, and what we want of the ratio."""

    kind: Kind
    level: str = ""
    """`default` or `best`, where a racer runs both ways; it is raced against ours of the same level."""
    goal: float | None = None
    against: str | None = None
    """Raced against this one, and not against ours."""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """How one racer ended: its median, and how many times as fast as it ours is."""

    name: str
    kind: Kind
    level: str
    value: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    goal: float | None = None
    against: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """`0.98: met`, `3: missed by 12 %`, `1: not sure`; nothing where there is no goal."""
        if self.goal is None or self.ratio is None or self.low is None:
            return ""
        if self.low == self.high:
            word = "one block says nothing"
        elif self.low >= self.goal:
            word = "met"
        elif self.ratio >= self.goal:
            word = "not sure"
        else:
            missed = max(0.01, 1 - self.ratio / self.goal)
            word = f"missed by {'under ' if missed == 0.01 else ''}{missed:.0%}".replace("%", " %")
        return f"{self.goal:.3g}: {word}"

    @property
    def ratio_text(self) -> str:
        if self.ratio is None:
            return ""
        digits = 3 if self.ratio < 2 else 2
        if self.low == self.high:
            return f"{self.ratio:.{digits}f} (one block)"
        return f"{self.ratio:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class Race:
    """One table: the same work by everybody."""

    title: str
    unit: str
    rows: list[Row]
    absent: dict[str, str] = field(default_factory=dict)
    """Who did not race, and why."""
    notes: list[str] = field(default_factory=list)

    @property
    def control_spread(self) -> float | None:
        """How far from 1 the control's interval reaches: no claim smaller than this."""
        spreads = [max(abs(row.low - 1), abs(row.high - 1)) for row in self.rows if row.kind == "control" and row.low]
        return max(spreads, default=None)


@dataclass(frozen=True)
class Result:
    """What one benchmark found."""

    id: str
    title: str
    goal: str
    races: list[Race] = field(default_factory=list)
    tables: list[Plain] = field(default_factory=list)
    """Tables that are no races."""
    headline: dict[str, float] = field(default_factory=dict)
    """`ours_over_raw`: our time over theirs, for one line of JSON."""


@dataclass(frozen=True)
class Plain:
    """A table of text."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def race(first: Block, second: Block, rounds: int) -> Ratio:
    """Both blocks by turns, A B B A."""
    figures = interleaved({"first": first, "second": second}, rounds)
    return compared(figures["first"], figures["second"])


def interleaved(blocks: Mapping[str, Block], rounds: int) -> dict[str, list[float]]:
    """One figure of every block for each round; every other round goes backwards: A B C C B A."""
    figures: dict[str, list[float]] = {name: [] for name in blocks}
    for number in range(rounds):
        for name in list(blocks)[:: 1 if number % 2 == 0 else -1]:
            figures[name].append(blocks[name]())
    return figures


def compared(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """The median of second / first over the rounds, and how far it would move if the rounds were drawn again."""
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(NUM_DRAWS))
    edge = NUM_DRAWS // 40
    return Ratio(
        first=statistics.median(first),
        second=statistics.median(second),
        ratio=statistics.median(ratios),
        low=medians[edge],
        high=medians[-edge - 1],
    )


def judge(
    title: str,
    unit: str,
    entries: Mapping[str, Entry],
    figures: Mapping[str, Sequence[float]],
    is_rate: bool = False,
    absent: Mapping[str, str] | None = None,
) -> Race:
    """The table of a race: every racer against ours of its own level, or against whom its entry says."""
    rows = []
    for name, entry in entries.items():
        if name not in figures:
            continue
        own = list(figures[name])
        other = entry.against or _ours_for(entries, figures, entry.level)
        row = Row(name, entry.kind, entry.level, statistics.median(own), note=entry.note)
        if other != name and not (entry.kind == "ours" and entry.against is None):
            # What is asked is how fast ours is beside the other; a control and a way of ours are themselves asked for.
            quick, slow = (
                (list(figures[other]), own) if entry.kind in ("peer", "limit") else (own, list(figures[other]))
            )
            found = compared(slow, quick) if is_rate else compared(quick, slow)
            row = Row(
                name,
                entry.kind,
                entry.level,
                row.value,
                found.ratio,
                found.low,
                found.high,
                entry.goal,
                other,
                entry.note,
            )
        rows.append(row)
    return Race(title, unit, rows, dict(absent or {}))


def _ours_for(entries: Mapping[str, Entry], figures: Mapping[str, Sequence[float]], level: str) -> str:
    ours = [name for name, one in entries.items() if one.kind == "ours" and one.against is None and name in figures]
    return next((name for name in ours if entries[name].level == level), ours[-1])


def ours_over(race_: Race, name: str) -> float:
    """Our time over that racer's: the reciprocal of what the table says; NaN if it did not race."""
    return next((1 / row.ratio for row in race_.rows if row.name == name and row.ratio), math.nan)


def timed(steps: Callable[[int], object], num: int, is_together: bool = False) -> float:
    """Milliseconds of each of `num` steps; ranks begin together."""
    if is_together:
        dist.barrier()
    started = time.perf_counter()
    steps(num)
    return (time.perf_counter() - started) / num * 1e3


def slowest(of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The figures of several ranks as one: a block ends when the last of them ends."""
    return {name: [max(one) for one in zip(*(rank[name] for rank in of_ranks), strict=True)] for name in of_ranks[0]}


def on_ranks(function: Callable[..., Any], *arguments: Any, devices: int = 2) -> list[Any]:
    """`evenstep.launch` in a folder that is thrown away."""
    with in_scratch():
        return evenstep.launch(function, *arguments, devices=devices)


@contextmanager
def in_scratch() -> Iterator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="evenstep-bench-") as name:
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def show(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(*heads, box=None)
    for row in rows:
        table.add_row(*row)
    Console(width=140, markup=False).print(title, table)


def show_result(result: Result) -> None:
    """Print everything that a benchmark found."""
    print(f"\n{result.id}: {result.title}. Goal: {result.goal}")
    for one in result.races:
        show(f"\n{one.title}", heads_of(one), cells_of(one))
        for note in notes_of(one):
            print(note)
    for table in result.tables:
        show(f"\n{table.title}", table.heads, table.rows)
        for note in table.notes:
            print(note)


def heads_of(race_: Race) -> list[str]:
    return ["racer", "setting", race_.unit, "ours is x as fast (95 %)", "goal: outcome"]


def cells_of(race_: Race) -> list[list[str]]:
    """The rows of a race as text, for a terminal or a page."""
    cells = []
    for row in race_.rows:
        name = {"limit": f"limit: {row.name}", "control": f"control: {row.name}"}.get(row.kind, row.name)
        ratio = row.ratio_text
        if row.kind == "control":
            ratio = f"{ratio} of the first"
        elif row.kind == "ours" and row.ratio is not None:
            ratio = f"{ratio} x {row.against}"
        cells.append([name, row.level, number(row.value), ratio, row.verdict])
    return cells


def notes_of(race_: Race) -> list[str]:
    """What belongs below the table: who was absent, what the control allows to be said."""
    spread = race_.control_spread
    control = [] if spread is None else [f"Control: nothing smaller than {spread:.1%} is claimed.".replace("%", " %")]
    absent = [f"{name} did not race: {why}" for name, why in race_.absent.items()]
    said = [f"{row.name}: {row.note}" for row in race_.rows if row.note]
    return [*control, *race_.notes, *said, *absent]


def number(value: float) -> str:
    """Three figures, and no more than are there."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def versions() -> dict[str, str]:
    """Of those who race; `absent` where one is not installed."""
    found = {}
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def write_pairs(out: str | None, result: dict[str, Any], name: str, ratios: Sequence[float]) -> None:
    """Print what pairs of runs gave, with the median and the range of their ratios; and write it, if asked to."""
    middle = {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    content = json.dumps({**result, name: {key: round(value, 3) for key, value in middle.items()}}, indent=1)
    print(content)
    if out:
        Path(out).write_text(content + "\n")


def write(path: str, command: str, results: object) -> None:
    """Leave the results in a file, with the command that made them and the machine that ran it."""
    now = datetime.datetime.now().isoformat(timespec="seconds")
    # Without it two ranks average by torch alone, which is another race.
    machine = {**facts(), "has_c_part": load() is not None}
    content = {"command": command, "when": now, "machine": machine, "peers": versions(), "results": results}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="few and short blocks: to see that it runs, and roughly how")
    made.add_argument("--out", metavar="FILE", help="leave the results there, as JSON")
    return made


def finish(result: Result, out: str | None) -> None:
    """Print, and write if asked to."""
    show_result(result)
    if out:
        command = shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        write(out, command, asdict(result))


def read_result(content: Mapping[str, Any]) -> Result:
    """What `finish` wrote."""
    races = [Race(**{**one, "rows": [Row(**row) for row in one["rows"]]}) for one in content["races"]]
    tables = [Plain(**one) for one in content["tables"]]
    return Result(**{**content, "races": races, "tables": tables})
