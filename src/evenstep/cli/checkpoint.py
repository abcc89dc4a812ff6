"""`evenstep checkpoint`: look at a checkpoint, export its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from evenstep.cli.app import (
    JsonOption,
    checkpoint_app,
    note_on_best,
    print_notes,
    print_whole,
    refuse_study,
)
from evenstep.cli.completion import complete_run, complete_task

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run folder or a checkpoint.", autocompletion=complete_run)
]


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
            metavar="FORMAT",
            help="safetensors: model.safetensors; torch: model.pt, a state_dict; "
            "hf: a folder for from_pretrained, if the model has save_pretrained.",
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            metavar="TASK",
            help="The task, for hf, if it lies outside this folder.",
            autocompletion=complete_task,
        ),
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
    from evenstep.checkpoint import files, integrity
    from evenstep.report.terminal import plain

    refuse_study(path)
    found, warnings = integrity.find(str(path))
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
