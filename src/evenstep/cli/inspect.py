"""`evenstep runs`, `evenstep audit` and `evenstep checkpoint`: looking at what a run has left."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from evenstep.cli.app import (
    JsonOption,
    app,
    checkpoint_app,
    note_on_best,
    print_notes,
    print_whole,
    refuse_study,
    without_nan,
)
from evenstep.cli.completion import complete_run, complete_task
from evenstep.errors import BadInput, EvenstepError, shorten

if TYPE_CHECKING:
    from evenstep.audit import Audit

RUNS_EXAMPLES = """
[bold]Examples[/bold]

evenstep runs

evenstep runs /data/runs --json
"""
AUDIT_EXAMPLES = """
[bold]Examples[/bold]

evenstep train digits --audit --name mine

evenstep audit runs/mine

evenstep audit runs/mine runs/mine-resumed runs/mine-resumed-again
"""
SHOWN_PROBLEMS = 10
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run folder or a checkpoint.", autocompletion=complete_run)
]


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


EXPORT_EXAMPLES = """
[bold]Examples[/bold]

evenstep checkpoint export runs/mine exported --to torch

evenstep checkpoint export runs/mine/checkpoints/best exported --to safetensors
"""


@checkpoint_app.command(epilog=EXPORT_EXAMPLES)
def export(
    path: RunArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to.")],
    to: Annotated[
        str,
        typer.Option(
            help="safetensors: model.safetensors; torch: model.pt, a state_dict; "
            "hf: a folder for from_pretrained, if the model has save_pretrained."
        ),
    ],
    task: Annotated[
        str | None, typer.Option(help="The task, for hf, if it lies outside this folder.", autocompletion=complete_task)
    ] = None,
) -> None:
    """Write the weights of a run for use without evenstep; of its latest checkpoint, or of the one that you name."""
    from evenstep.checkpoint.export import export

    refuse_study(path)
    for one in export(path, to, folder, task):
        print(one)
    print_notes(note_on_best(path))


INSPECT_EXAMPLES = """
[bold]Examples[/bold]

evenstep checkpoint inspect runs/mine

evenstep checkpoint inspect runs/mine/checkpoints/best --json
"""


@checkpoint_app.command(epilog=INSPECT_EXAMPLES)
def inspect(
    path: RunArgument,
    as_json: JsonOption = False,
) -> None:
    """Check that a checkpoint is complete, and show what it holds; exit code 2 if it is damaged."""
    from evenstep.checkpoint import files
    from evenstep.report.terminal import plain

    refuse_study(path)
    found, warnings = files.find(str(path))
    state = files.read_state(found)
    tensors = files.tensor_table(found / files.WEIGHTS)
    facts: dict[str, Any] = {
        "checkpoint": str(found),
        "step": state["step"],
        "samples_seen": state["loader"]["position"],
        "samples_an_epoch": state["loader"]["num_samples"],
        "valid": state.get("valid", {}),
        "strategy": (state.get("plan") or {}).get("strategy"),
        "evenstep": state["evenstep"],
        "torch": state["torch"],
    }
    if as_json:
        weights = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in tensors.items()}
        print(json.dumps({**facts, "whole": True, "warnings": warnings, "weights": weights}))
        return
    console = Console(highlight=False, emoji=False)
    for warning in warnings:
        console.print(warning, style="yellow", markup=False)
    for key, value in (facts | {"complete": "yes"}).items():
        shown = ", ".join(f"{name} {number:.4f}" for name, number in value.items()) if key == "valid" else value
        console.print(f"{key.replace('_', ' '):<18} {shown or '-'}", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("weight", "type", "shape"):
        table.add_column(column)
    for name, (dtype, shape) in tensors.items():
        table.add_row(plain(name), plain(dtype), " x ".join(map(str, shape)) or "one number")
    console.print()
    print_whole(table, console)
