"""What `predict` prints on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from evenstep.predict.published import CheckResult


def show_check(result: CheckResult, console: Console) -> None:
    """The errors of every family, first; then what is suspect in the tables, and what is not reached."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("family", no_wrap=True)
    for head in ("rows", "median", "p90", "worst", "linear*", "skill**", "in interval"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in (*result.families, result.total):
        table.add_row(
            one.name,
            str(one.points),
            f"{one.median:.1%}",
            f"{one.p90:.1%}",
            f"{one.worst:.1%}",
            f"{one.linear:.1%}",
            f"{one.skill:.2f}",
            f"{one.covered:.0%}",
        )
    console.print(table)
    lines = [
        "",
        "* median error of n devices being n times as fast; ** 1 - mean error / that of linear scaling",
        "Each family is predicted with constants and a 90 % interval that were chosen without it.",
        "",
        *_bound(result),
        *(f"suspect, and not used: {line}" for line in result.suspects),
        "",
        *(f"not met: {line}" for line in result.unmet),
    ]
    for line in lines if result.unmet else [*lines, "all targets are met"]:
        console.print(line, markup=False, soft_wrap=True)


def _bound(result: CheckResult) -> list[str]:
    names = dict.fromkeys(f"{row.family}: {row.name}" for row in result.rows if row.is_input_bound)
    return [f"limited by input: {name}" for name in names]
