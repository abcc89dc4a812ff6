"""A comparison on a terminal: how fast, what a step is made of, what it learns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.record import PARTS
from evenstep.report.comparison import Comparison, Row, Spread
from evenstep.report.progress import without_control
from evenstep.report.table import devices, plain, size

LEARNS = {
    "reference": ("the measure", "dim"),
    "same": ("✓ the same", "green"),
    "differs": ("✗ something else", "red"),
    "failed": ("✗ failed", "red"),
    "unknown": ("? not known", "yellow"),
}


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Two tables, what did not run, and what to do."""
    console.print(speed_table(comparison))
    console.print()
    console.print(step_table(comparison))
    for line in _remarks(comparison):
        console.print(without_control(line), style="yellow", markup=False, soft_wrap=True)
    console.print()
    for line in comparison.advice:
        console.print(without_control(line), style="bold", markup=False, soft_wrap=True)


def speed_table(comparison: Comparison) -> Table:
    """Samples a second, and what they are worth."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("way", "devices"):
        table.add_column(name, no_wrap=True)
    for name in ("samples/s", "spread", "speed-up", "efficiency", "start-up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("learns", no_wrap=True)
    for row in comparison.rows:
        rate = row.samples_per_second
        said, style = LEARNS[row.parity]
        table.add_row(
            plain(row.strategy),
            devices(row.devices),
            f"{rate.middle:,.0f}",
            f"{rate.low:,.0f}-{rate.high:,.0f}",
            f"{comparison.speedup(row):.2f}x",
            f"{comparison.efficiency(row):.0%}",
            f"{row.start_seconds.middle:.1f} s",
            Text(said, style=style),
        )
    return table


def step_table(comparison: Comparison) -> Table:
    """Where a step goes, in milliseconds, and what it holds and sends."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("a step, in ms", no_wrap=True)
    short = {"communication": "comm.*", "optimizer": "optim."}
    limits = ("no input", "no comm.")
    for name in ("whole", *(short.get(part, part) for part in PARTS), *limits, "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("peak memory")
    for row in comparison.rows:
        table.add_row(
            plain(row.label),
            _ms(row.step_seconds),
            *(f"{row.parts.get(part, 0.0) * 1000:.2f}" for part in PARTS),
            _ms(row.without_input_seconds),
            _ms(row.without_communication_seconds),
            size_in_short(row.sent_bytes),
            _peaks(row),
        )
    return table


def _remarks(comparison: Comparison) -> Iterator[str]:
    yield "* what of communication is not hidden behind backward; no input, no comm.: the same step without it"
    for row in comparison.rows:
        if not row.is_sound:
            yield f"{row.label} learns something else: {row.why}"
    for label, why in comparison.left_out.items():
        yield f"{label} could not run: {why}"


def _ms(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.middle * 1000:.2f}"


def _peaks(row: Row) -> str:
    return ", ".join(size(peak) for peak in row.peak_bytes.values())


def size_in_short(num_bytes: int) -> str:
    """Bytes, from few to many."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.0f} KiB" if num_bytes else "-"
    return size(num_bytes)
