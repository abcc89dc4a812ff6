"""A comparison on a terminal: how fast, what a step is made of, what it learns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.record import PARTS
from evenstep.report.comparison import Comparison, Spread
from evenstep.report.progress import without_control
from evenstep.report.table import plain, size

LEARNS = {
    "reference": ("the measure", "dim"),
    "same": ("✓ the same", "green"),
    "differs": ("✗ something else", "red"),
    "unknown": ("? not checked", "yellow"),
}


def show_comparison(comparison: Comparison, console: Console) -> None:
    """How fast, what a step is made of, what it holds; what did not run, and what to do."""
    for table in (speed_table(comparison), step_table(comparison), cost_table(comparison)):
        console.print(table)
        console.print()
    for line in _remarks(comparison):
        console.print(without_control(line), style="yellow", markup=False, soft_wrap=True)
    console.print()
    for line in comparison.advice:
        console.print(without_control(line), style="bold", markup=False, soft_wrap=True)


def speed_table(comparison: Comparison) -> Table:
    """Samples a second, and what they are worth."""
    table = _table("way", "samples/s", "spread", "speed-up", "efficiency")
    table.add_column("learns", no_wrap=True)
    for row in comparison.rows:
        rate = row.samples_per_second
        said, style = LEARNS[row.parity]
        table.add_row(
            plain(row.label),
            f"{rate.middle:,.0f}",
            f"{rate.low:,.0f}-{rate.high:,.0f}",
            f"{comparison.speedup(row):.2f}x",
            f"{comparison.efficiency(row):.0%}",
            Text(said, style=style),
        )
    return table


def step_table(comparison: Comparison) -> Table:
    """Where a step goes, in milliseconds."""
    short = {"communication": "comm.*", "optimizer": "optim."}
    table = _table("ms a step", "whole", *(short.get(part, part) for part in PARTS), "no input", "no comm.")
    for row in comparison.rows:
        table.add_row(
            plain(row.label),
            _ms(row.step_seconds),
            *(f"{row.parts.get(part, 0.0) * 1000:.2f}" for part in PARTS),
            _ms(row.without_input_seconds),
            _ms(row.without_communication_seconds),
        )
    return table


def cost_table(comparison: Comparison) -> Table:
    """What a way holds, sends and waits for before its first step."""
    table = _table("cost", "start-up", "sent a step")
    table.add_column("peak memory")
    for row in comparison.rows:
        peaks = ", ".join(size(peak) for peak in row.peak_bytes.values())
        table.add_row(plain(row.label), f"{row.start_seconds.middle:.1f} s", size_in_short(row.sent_bytes), peaks)
    return table


def _table(first: str, *more: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in more:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _remarks(comparison: Comparison) -> Iterator[str]:
    yield "* not hidden behind backward; no input, no comm.: the same step on a batch that is there, or sending nothing"
    for row in comparison.rows:
        if not row.is_sound:
            yield f"{row.label} learns something else: {row.why}"
        if row.parity == "unknown":
            yield f"{row.label} was not checked: {row.why}"
        if row.strategy == "dp-torch":
            yield f"{row.label}: what it sends is inside forward and backward, and cannot be told apart"
    if any(device.startswith("cuda") for row in comparison.rows for device in row.devices):
        yield "on a card, train replays steps as CUDA graphs where that is safe (--fast); these are plain steps"
    for label, why in comparison.left_out.items():
        yield f"{label} could not run: {why}"


def _ms(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.middle * 1000:.2f}"


def size_in_short(num_bytes: int) -> str:
    """Bytes, from few to many."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.0f} KiB" if num_bytes else "-"
    return size(num_bytes)
