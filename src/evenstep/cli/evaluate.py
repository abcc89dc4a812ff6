"""`evenstep evaluate`: what a checkpoint gives on validation data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from evenstep.cli.app import (
    DataOption,
    JsonOption,
    OptionsArgument,
    WorkersOption,
    app,
    fields_as_options,
    flag,
    note_on_best,
    print_notes,
    print_whole,
    refuse_study,
    without_nan,
)
from evenstep.cli.completion import complete_run, complete_strategy, complete_task
from evenstep.cli.settings import SettingsOption, TaskArguments, choose_task
from evenstep.strategy_facts import STRATEGIES, one_of

if TYPE_CHECKING:
    from evenstep.launcher.evaluating import EvaluatedCheckpoint

EXAMPLES = """
[bold]Examples[/bold]

evenstep evaluate runs/mine

evenstep evaluate runs/mine/checkpoints/best --data /data/test

evenstep evaluate runs/mine my_task.py split=test --strategy ddp --devices 2
"""


@dataclass(frozen=True)
class EvaluateOptions:
    """Arguments and options of `evenstep evaluate`."""

    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A run folder (its newest checkpoint), or a checkpoint, such as runs/mine/checkpoints/best.",
            autocompletion=complete_run,
        ),
    ]
    task: Annotated[
        str | None,
        typer.Argument(metavar="TASK", help="Task to use; default: that of the run.", autocompletion=complete_task),
    ] = None
    options: OptionsArgument = None
    settings: SettingsOption = None
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{one_of(STRATEGIES.values())}; default: that of the run.",
            autocompletion=complete_strategy,
        ),
    ] = None
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N|LIST",
            help="Number of devices, or a list such as cuda:0,cuda:1; default: those of the run.",
        ),
    ] = None
    batch: Annotated[
        int | None, typer.Option(metavar="N", help="Global batch size, over all devices; default: that of the run.")
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="fp64, fp32, tf32, bf16 or fp16; default: that of the run."),
    ] = None
    data: DataOption = None
    workers: WorkersOption = None
    quiet: Annotated[bool, flag("--quiet", "-q", help="Show no notes: only errors and the result.")] = False
    as_json: JsonOption = False


@app.command(epilog=EXAMPLES)
@fields_as_options
def evaluate(given: EvaluateOptions) -> None:
    """Evaluate a checkpoint: the loss, metrics and scores of all validation data, the same on any number of devices."""
    which = TaskArguments(given.task, given.options, given.settings)
    task, options = choose_task(which, f"evaluate {given.checkpoint}")
    from evenstep.launcher.evaluating import evaluate as evaluated

    choices = {
        "strategy": given.strategy,
        "devices": given.devices,
        "batch": given.batch,
        "precision": given.precision,
        "data": given.data,
        "workers": given.workers,
        "options": options,
    }
    refuse_study(given.checkpoint)
    log = (lambda notes: None) if given.quiet else print_notes
    found = evaluated(given.checkpoint, task, choices, log)
    log(note_on_best(given.checkpoint))
    if given.as_json:
        print(json.dumps(without_nan(asdict(found))))
    else:
        _show(found)


def _show(found: EvaluatedCheckpoint) -> None:
    from evenstep.report.terminal import number, plain

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("checkpoint", plain(found.checkpoint))
    table.add_row("step", str(found.step))
    table.add_row("evaluated", f"{found.samples:,} samples in {found.seconds:.1f} s")
    for name, value in found.values.items():
        table.add_row(f"valid {plain(name)}", number(value))
    print_whole(table, Console(highlight=False, emoji=False))
