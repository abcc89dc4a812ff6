"""Verdicts as a table with ticks, and the sentences below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from evenstep.report.table import plain
from evenstep.verify.verdict import PARTS, Part, Verdict, Way

EACH = "each of them"
"""In the place of a way's name, where several have one cause."""


def table(verdicts: Mapping[Way, Verdict]) -> Table:
    """One row for each way: the largest difference of each part, and whether that is rounding."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", *PARTS):
        made.add_column(column, no_wrap=True)
    for way, verdict in verdicts.items():
        style = "bold" if verdict.is_same else "bold red"
        cells = [_cell(verdict.parts.get(name)) for name in PARTS]
        made.add_row(Text(plain(way.label), style=style), *cells)
    return made


def _cell(part: Part | None) -> Text:
    if part is None or part.difference is None:
        return Text("-", style="dim")
    size = "" if part.difference in (0.0, float("inf")) else f" {part.difference:.0e}"
    return Text(f"✓{size}", style="green") if part.is_same else Text(f"✗{size}", style="red")


def lines(verdicts: Mapping[Way, Verdict], num_ways: int, batch: int, seconds: float) -> Iterator[tuple[str, str]]:
    """What follows the table: each failing way in a few lines, then what holds for all that were asked for."""
    for alike in _by_cause(verdicts):
        yield from _paragraph(alike)
    notes = dict.fromkeys(note for verdict in verdicts.values() for note in verdict.notes)
    yield "", ""
    yield from ((f"note: {note}", "dim") for note in notes)
    good = sum(verdict.is_same for verdict in verdicts.values())
    number = "all" if good == num_ways else f"{good} of {num_ways}"
    yield f"{number} ways learn what one device learns (batch {batch}, {seconds:.0f} s)", "bold"


def _by_cause(verdicts: Mapping[Way, Verdict]) -> list[dict[Way, Verdict]]:
    """Ways that fail, those with one cause together."""
    groups: dict[tuple[str, ...], dict[Way, Verdict]] = {}
    for way, verdict in verdicts.items():
        if not verdict.is_same:
            why = verdict.why.replace(way.label, EACH)
            groups.setdefault((verdict.cause, why, verdict.advice), {})[way] = verdict
    return list(groups.values())


def _paragraph(alike: Mapping[Way, Verdict]) -> Iterator[tuple[str, str]]:
    """Where each of them first differs; then why, once."""
    way, verdict = next(iter(alike.items()))
    yield "", ""
    yield from ((f"{one.sentence}.", "bold red") for one in alike.values())
    yield f"  why: {verdict.why if len(alike) == 1 else verdict.why.replace(way.label, EACH)}.", ""
    evidence = dict.fromkeys(line for one in alike.values() for line in one.evidence)
    yield from ((f"  tested: {line}", "dim") for line in evidence)
    if verdict.advice:
        yield f"  what to do: {verdict.advice}", "bold"
