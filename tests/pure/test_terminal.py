"""Tables on a terminal of any width, and in a file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.record import Summary
from evenstep.report.terminal import print_table, summary_table, table_of

HEADS = ("strategy", "total", "input", "forward", "backward", "communication", "optimizer", "90 % interval")


def wide_table() -> Table:
    table = table_of(*HEADS)
    for number in range(1, 4):
        cells = [f"{1000 * number + at}.{at}{number}" for at in range(len(HEADS) - 2)]
        table.add_row(f"pipeline x {2**number} 1f1b", *cells, Text(f"0.58x (0.42 to 0.{number}9)"), style="bold")
    return table


def printed(width: int | None, terminal: bool) -> str:
    out = io.StringIO()
    print_table(wide_table(), Console(file=out, width=width, force_terminal=terminal, color_system=None))
    return out.getvalue()


@pytest.mark.parametrize(("width", "terminal"), [(60, True), (80, True), (120, True), (200, True), (80, False)])
def test_a_table_is_never_cut(width: int, terminal: bool) -> None:
    text = printed(width, terminal)
    assert "…" not in text
    cells = [str(cell) for column in wide_table().columns for cell in column.cells]
    assert [cell for cell in (*HEADS, *cells) if cell not in text] == []


@pytest.mark.parametrize(("width", "parts"), [(60, 3), (80, 2), (120, 1)])
def test_columns_that_do_not_fit_are_printed_below_with_their_rows_names(width: int, parts: int) -> None:
    text = printed(width, terminal=True)
    assert max(map(len, text.splitlines())) <= width
    assert [text.count(name) for name in ("strategy", "pipeline x 4 1f1b")] == [parts, parts]


def test_in_a_file_each_row_is_one_line() -> None:
    assert len(printed(80, terminal=False).splitlines()) == 4


def test_a_cell_wider_than_the_terminal_is_whole() -> None:
    assert "0.58x (0.42 to 0.19)" in printed(20, terminal=True)


def test_a_summary_says_what_its_numbers_count() -> None:
    summary = Summary(
        strategy="ddp",
        devices=["cpu", "cpu"],
        steps=5200,
        samples=320_000,
        train_loss=0.5,
        valid={},
        samples_per_second=28_809.0,
        seconds=33.8,
        peak_bytes={"cpu": 2**28},
        checkpoint=None,
        run="runs/one",
    )
    out = io.StringIO()
    Console(file=out, width=120).print(summary_table(summary, restarts=2))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines[:3] == [
        "trained 5200 steps, 320,000 samples in 33.8 s with evaluation and checkpoints",
        "speed 28,809 samples/s in steps alone (ddp, 2 x cpu)",
        "restarts 2",
    ]
