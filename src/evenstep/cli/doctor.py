"""`evenstep doctor`: what this machine can do, what is wrong, and what to set."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

import evenstep
from evenstep.cli.app import JsonOption, MachinesOption, RendezvousOption, app, error_console, progress_bar
from evenstep.errors import EvenstepError

if TYPE_CHECKING:
    from evenstep.doctor import Finding
    from evenstep.doctor.checks import Examination, Report

EXAMPLES = """
[bold]Examples[/bold]

evenstep doctor

evenstep doctor --json | python -m json.tool

evenstep doctor --machines 2 --rendezvous node0:29400
"""
MARKS = {"good": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "bold red")}


@app.command(epilog=EXAMPLES)
def doctor(
    machines: MachinesOption = None,
    rendezvous: RendezvousOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: what works, what is wrong and how to fix it; exit code 1 if any check is bad."""
    from evenstep.plan import parse_rendezvous

    parse_rendezvous(machines, rendezvous)
    environment = dict(os.environ)
    from evenstep.launcher.fork_server import start_server

    # It imports torch while this process does. If it cannot be started, the trials report it.
    with suppress(OSError):
        start_server()
    from evenstep.doctor import worst

    try:
        report = _examined(environment, machines, rendezvous)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; nothing was changed, nothing is left running") from None
    if not report.is_first:
        error_console().print(report.findings[0].said, markup=False)
    elif as_json:
        print(json.dumps(_to_json(report)))
    else:
        show(report, Console(highlight=False, emoji=False))
    if worst(report.findings) == "bad":
        raise typer.Exit(EvenstepError.exit_code)


def _examined(environment: dict[str, str], machines: str | None, rendezvous: str | None) -> Report:
    from evenstep.doctor.checks import Report, examine

    events: Examination = examine(environment)
    if machines is not None and rendezvous is not None:
        from evenstep.doctor.cluster import examine_together  # what it imports is not needed on one machine

        events = examine_together(environment, machines, rendezvous)
    with closing(events), progress_bar(total=1) as log:
        for event in events:
            if isinstance(event, Report):
                return event
            # What takes no time is worth a bar's step, but no line.
            if event.is_trial or sys.stderr.isatty():
                log(f"{event.name} ...", event.total)
    raise EvenstepError("the other machines have ended without this one; give the same command to all of them")


def _to_json(report: Report) -> dict[str, Any]:
    from evenstep.doctor import STATUSES, count, worst

    return {
        "evenstep": evenstep.__version__,
        "status": worst(report.findings),
        **{status: count(report.findings, status) for status in STATUSES},
        "seconds": report.seconds,
        "findings": [finding.to_json() for finding in report.findings],
    }


def show(report: Report, console: Console) -> None:
    """A table with ticks on a terminal; one line for each thing, with plain words, anywhere else."""
    if console.is_terminal and not console.options.ascii_only:
        console.print(_table(report.findings))
    else:
        for line in plain_lines(report.findings):
            console.print(line, markup=False, soft_wrap=True)
    console.print(summary(report), style="bold", markup=False)


def summary(report: Report) -> str:
    """The last line: how many of each, and how long it took."""
    from evenstep.doctor import count

    good, warn, bad = (count(report.findings, status) for status in ("good", "warn", "bad"))
    return f"{good} good, {warn} warnings, {bad} bad ({report.seconds:.0f} s)"


def plain_lines(findings: tuple[Finding, ...]) -> Iterator[str]:
    """The table as plain text."""
    from evenstep.report.terminal import without_control

    names = [without_control(finding.name) for finding in findings]
    width = max(map(len, names), default=0)
    for name, finding in zip(names, findings, strict=True):
        yield f"{finding.status:<4}  {name:<{width}}  {without_control(finding.said)}"
        if finding.advice:
            yield f"{'':<4}  {'':<{width}}  -> {without_control(finding.advice)}"


def _table(findings: tuple[Finding, ...]) -> Table:
    from evenstep.report.terminal import plain

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = MARKS[finding.status]
        table.add_row(f"[{style}]{mark}[/]", plain(finding.name), plain(finding.said))
        if finding.advice:
            table.add_row("", "", f"[{style}]→ {plain(finding.advice)}[/]")
    return table
