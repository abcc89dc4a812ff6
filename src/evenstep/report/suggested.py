"""Suggestions on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MUCH = 1.05
"""Less than this, by the worst of its rounds against the best without it, is not worth another arithmetic."""


def show_suggestions(found: list[Any], command: str, console: Console) -> None:
    """What each change gives and costs; and the command that takes the best of them."""
    plain, *others = found
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("change", "ms a step", "x as fast", "loss then", "first step", "pays after"):
        table.add_column(head, justify="left" if head == "change" else "right", no_wrap=True)
    for one in found:
        if one.problem:
            table.add_row(one.flag, Text("does not run", style="yellow"))
            continue
        steps = one.pays_after(plain)
        after = "" if one is plain else "never" if steps is None else f"{steps:,} steps"
        gain = plain.step_seconds / one.step_seconds
        cells = (f"{one.step_seconds * 1e3:.2f}", f"{gain:.2f}x", f"{one.loss:.4f}", f"{one.start_seconds:.1f} s")
        table.add_row(one.flag or "(none)", *cells, after)
    console.print(table)
    console.print()
    for one in others:
        said = f"{one.flag}: {f'does not run: {one.problem}' if one.problem else one.means}"
        console.print(said, style="dim", markup=False, soft_wrap=True)
    worth = [one for one in others if not one.problem and min(plain.rounds) / max(one.rounds) >= MUCH]
    best = min(worth, key=lambda one: one.step_seconds, default=None)
    console.print()
    if best is None:
        console.print("Nothing was changed, and nothing here is worth a change.", style="bold", soft_wrap=True)
        return
    said = f"Nothing was changed. The fastest of these: {command} {best.flag}"
    console.print(said, style="bold", markup=False, soft_wrap=True)
    console.print("It computes other numbers: look whether it learns as well.", style="dim", soft_wrap=True)
