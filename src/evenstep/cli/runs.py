"""`evenstep runs`: what there is in a folder of runs."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from evenstep.cli.app import (
    JsonOption,
    app,
    print_whole,
    without_nan,
)
from evenstep.errors import BadInput, shorten

RUNS_EXAMPLES = """
[bold]Examples[/bold]

evenstep runs

evenstep runs /data/runs --json
"""


@app.command(epilog=RUNS_EXAMPLES)
def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of run folders; default: runs.", show_default=False)
    ] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List runs with their state (running, done, stopped, failed, killed) and result, the latest last."""
    from evenstep.report.run_list import list_runs, runs_table

    if not os.path.isdir(folder) and (os.path.exists(folder) or folder != Path("runs")):
        raise BadInput(f"{shorten(str(folder))} is not a folder; give the one that was given to --out")
    found = list_runs(folder) if os.path.isdir(folder) else []
    if as_json:
        print(json.dumps([without_nan(dataclasses.asdict(one)) for one in found]))
    elif not found:
        print(f"no runs in {folder}; train one: evenstep train digits")
    else:
        print_whole(runs_table(found), Console(highlight=False, emoji=False))
