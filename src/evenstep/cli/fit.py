"""`evenstep fit`: does a step fit in memory, and with which micro-batch?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from evenstep.cli.app import (
    BatchOption,
    CheckpointActivationsOption,
    DataOption,
    OutOption,
    OutputOptions,
    PrecisionOption,
    SeedOption,
    ThreadsOption,
    WorkersOption,
    app,
    fields_as_options,
    progress,
)
from evenstep.cli.completion import complete_strategy
from evenstep.cli.settings import TaskArguments, need_task
from evenstep.strategy_facts import REFERENCE, STRATEGIES, one_of, usual_strategies

EXAMPLES = """
[bold]Examples[/bold]

evenstep fit my_task.py

evenstep fit my_task.py --devices 4 --memory 24GB

evenstep fit my_task.py --strategy fsdp --devices 64 --memory 80GB --batch 1024 --precision bf16
"""


@dataclass(frozen=True)
class FitOptions:
    """Options of `evenstep fit`."""

    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{one_of(STRATEGIES.values())}; default: {REFERENCE}, and with several --devices also "
            f"{', '.join(row.name for row in usual_strategies())}.",
            autocompletion=complete_strategy,
        ),
    ] = None
    devices: Annotated[
        str,
        typer.Option(
            metavar="N|LIST",
            help="Number of devices, or a list such as cuda:0,cuda:1; devices that are not here are only forecast.",
        ),
    ] = "1"
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of each device, such as 24GB or 16GiB; default: what is free here."),
    ] = None
    pipeline_schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Order of forward and backward passes in a pipeline: 1f1b (default), gpipe, interleaved or "
            "zero-bubble.",
        ),
    ] = None
    batch: BatchOption = None
    precision: PrecisionOption = None
    checkpoint_activations: CheckpointActivationsOption = None
    workers: WorkersOption = None
    threads: ThreadsOption = None
    data: DataOption = None
    seed: SeedOption = None
    out: OutOption = None


@app.command(epilog=EXAMPLES)
@fields_as_options
def fit(chosen_task: TaskArguments, given: FitOptions, output: OutputOptions) -> None:
    """Forecast the memory of a step by kind (weights, gradients ...), and find the largest and fastest micro-batch.

    Exit code 1 if nothing fits.
    """
    from evenstep.fit.fit_table import fit_to_json, show_fit
    from evenstep.fit.memory_model import parse_bytes
    from evenstep.launcher.fit_micro_batch import FitRequest
    from evenstep.launcher.fit_micro_batch import fit as find

    source, options = need_task(chosen_task, "fit")
    request = FitRequest(
        source=source,
        strategy=given.strategy,
        devices=given.devices,
        memory=parse_bytes(given.memory) if given.memory is not None else None,
        choices={
            "batch": given.batch,
            "precision": given.precision,
            "workers": given.workers,
            "threads": given.threads,
            "data": given.data,
            "checkpoint_activations": given.checkpoint_activations,
            "pipeline_schedule": given.pipeline_schedule,
            "seed": given.seed,
            "out": given.out,
            "options": options,
        },
    )
    with progress(quiet=output.quiet) as log:
        found = find(request, log)
    if output.as_json:
        print(json.dumps(fit_to_json(found)))
    else:
        show_fit(found, Console(highlight=False, emoji=False))
    if all(row.micro_batch is None for row in found.rows):
        raise typer.Exit(1)
