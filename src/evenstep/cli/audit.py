"""`evenstep audit`: which samples a run used more than once, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from evenstep.cli.app import (
    JsonOption,
    app,
)
from evenstep.cli.completion import complete_run
from evenstep.errors import EvenstepError

if TYPE_CHECKING:
    from evenstep.audit import Audit


AUDIT_EXAMPLES = """
[bold]Examples[/bold]

evenstep train digits --audit --name mine

evenstep audit runs/mine

evenstep audit runs/mine runs/mine-resumed runs/mine-resumed-again
"""

SHOWN_PROBLEMS = 10


@app.command(epilog=AUDIT_EXAMPLES)
def audit(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folder of a run trained with --audit, followed by those of runs resumed from it.",
            autocompletion=complete_run,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Count the samples that a training run used more than once or not at all; exit code 1 if there are any."""
    from evenstep.audit import audit as read_and_count

    found = read_and_count(runs)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        _show_audit(found)
    if not found.is_clean:
        raise typer.Exit(EvenstepError.exit_code)


def _show_audit(found: Audit) -> None:
    from evenstep.report.terminal import without_control

    lines = [(found.sentence(), "bold")]
    if found.redone:
        lines.append((f"{found.redone} more were lost when a run was cut off, and done again", "dim"))
    lines += [(problem, "red") for problem in found.problems[:SHOWN_PROBLEMS]]
    if found.num_problems > SHOWN_PROBLEMS:
        lines.append((f"and {found.num_problems - SHOWN_PROBLEMS} more problems", "red"))
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for line, style in lines:
        console.print(without_control(line), style=style, markup=False)
