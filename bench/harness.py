"""What the benchmarks share: interleaved blocks, ratios with their intervals, tables, and a file with the machine.

A block is a function that runs once and returns its figure: milliseconds a step, or samples a second. Blocks are
interleaved A B B A in one process; a ratio is the median over the rounds with a bootstrap 95 % interval. A block raced
against itself is the control: no claim smaller than its spread.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evenstep.worker.machine import facts

Block = Callable[[], float]
NUM_DRAWS = 2000


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


def show(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(*heads, box=None)
    for row in rows:
        table.add_row(*row)
    Console(width=120, markup=False).print(title, table)


def write(path: str, command: str, results: object) -> None:
    """Leave the results in a file, with the command that made them and the machine that ran it."""
    content = {"command": command, "machine": facts(), "results": results}
    Path(path).write_text(json.dumps(content, indent=1))
