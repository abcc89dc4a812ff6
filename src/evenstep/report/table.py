"""Runs side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from evenstep.record import Record, Summary
from evenstep.report.progress import without_control


def side_by_side(records: Sequence[Record]) -> Table:
    """One row a run: what it learned, how fast, and what it held in memory."""
    finished = [record.summary for record in records if record.summary is not None]
    names = list(dict.fromkeys(name for summary in finished for name in summary.valid))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("strategy", "devices"):
        table.add_column(column, no_wrap=True)
    measured = ["valid loss" if name == "loss" else plain(name) for name in names]
    for column in ("train loss", *measured, "samples/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("peak memory")
    for summary in finished:
        table.add_row(
            summary.strategy,
            devices(summary.devices),
            number(summary.train_loss),
            *(number(summary.valid.get(name)) for name in names),
            f"{summary.samples_per_second:,.0f}",
            peaks(summary),
        )
    return table


def summary_table(summary: Summary) -> Table:
    """The end of one run."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("trained", f"{summary.steps} steps, {summary.samples:,} samples in {summary.seconds:.1f} s")
    table.add_row(
        "speed", f"{summary.samples_per_second:,.0f} samples/s ({summary.strategy}, {devices(summary.devices)})"
    )
    if summary.train_loss is not None:
        table.add_row("train loss", number(summary.train_loss))
    for name, value in summary.valid.items():
        table.add_row(f"valid {plain(name)}", number(value))
    table.add_row("peak memory", peaks(summary))
    if summary.checkpoint:
        table.add_row("checkpoint", plain(summary.checkpoint))
    table.add_row("run", plain(summary.run))
    return table


def plain(text: str) -> str:
    """A name as it is: no markup, no control bytes, whoever chose it."""
    return escape(without_control(text))


def devices(names: Sequence[str]) -> str:
    """`cpu, cpu` is `2 x cpu`."""
    unique = list(dict.fromkeys(names))
    if len(unique) == 1:
        return unique[0] if len(names) == 1 else f"{len(names)} x {unique[0]}"
    return ", ".join(names)


def peaks(summary: Summary) -> str:
    """Peak memory for each device; a process on the CPU counts as a whole, with torch itself in it."""
    sizes = Counter(size(value) for value in summary.peak_bytes.values())
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in sizes.items())


def size(num_bytes: int) -> str:
    """Bytes in the unit people read."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def number(value: float | None) -> str:
    """Four digits after the point, or a dash."""
    return "-" if value is None else f"{value:.4f}"
