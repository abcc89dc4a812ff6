"""`evenstep compare`."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from evenstep.cli.app import (
    BatchOption,
    DataOption,
    MeshOption,
    OutputOptions,
    PrecisionOption,
    SeedOption,
    ThreadsOption,
    WorkersOption,
    app,
    fields_as_options,
    flag,
    progress,
)
from evenstep.cli.settings import TaskArguments, need_task
from evenstep.errors import BadInput
from evenstep.strategy_facts import STRATEGIES, with_processes

if TYPE_CHECKING:
    from evenstep.compare.compare_links import LinkRequest
    from evenstep.compare.compare_strategies import CompareRequest
    from evenstep.report.comparison import Comparison

EXAMPLES = """
[bold]Examples[/bold]

evenstep compare digits --devices 1,2

evenstep compare my_task.py --devices 1,2,4 --strategies dp,ddp --batch 512

evenstep compare my_task.py --devices cuda:0/cuda:0,cuda:1 --precision bf16
"""


@dataclass(frozen=True)
class CompareOptions:
    """Options of `evenstep compare`."""

    devices: Annotated[
        str,
        typer.Option(
            metavar="N,...|LISTS",
            help="Device counts such as 1,2,4, or slash-separated lists of different lengths: cuda:0/cuda:0,cuda:1.",
        ),
    ] = "1,2"
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help=f"Comma-separated: {', '.join(STRATEGIES)}; default: all that can run here."
        ),
    ] = None
    rounds: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=50, help="How often each strategy is measured; more is more reliable."),
    ] = 3
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Timed steps per measurement; default: as many as take one second."),
    ] = None
    batch: BatchOption = None
    precision: PrecisionOption = None
    workers: WorkersOption = None
    threads: ThreadsOption = None
    data: DataOption = None
    seed: SeedOption = None
    sync_batchnorm: Annotated[
        bool,
        flag("--sync-batchnorm", help=f"Use SyncBatchNorm under {with_processes()}."),
    ] = False
    virtual_replicas: Annotated[
        int | None,
        typer.Option(
            metavar="V", min=1, help="Also measure each strategy with V virtual replicas, to show their cost."
        ),
    ] = None
    shares: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Also measure strategies with these shares of a batch, to show their gain."
        ),
    ] = None
    mesh: MeshOption = None
    accumulate: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Micro-batches per optimizer step, in all rows but the first (the reference: one device, the whole "
            "batch).",
        ),
    ] = 1
    pipeline_schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Orders of forward and backward passes in a pipeline, a row for each: 1f1b, gpipe, interleaved, "
            "zero-bubble.",
        ),
    ] = None
    links: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD,...",
            help="Compare --link methods instead, such as none,bf16,local:20, by the time to reach the same loss.",
        ),
    ] = None
    seeds: Annotated[
        int, typer.Option(metavar="N", help="With --links: number of seeds that each method trains with.")
    ] = 3
    target: Annotated[
        float | None,
        typer.Option(metavar="LOSS", help="With --links: loss to reach; default: what the first method reaches."),
    ] = None
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the comparison's folder; default: from date and task."),
    ] = None
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder in which the comparison's folder is created; default: runs."),
    ] = None


@app.command(epilog=EXAMPLES)
@fields_as_options
def compare(chosen_task: TaskArguments, given: CompareOptions, output: OutputOptions) -> None:
    """Measure the speed of strategies on your task: a table, a recommendation, and an HTML page in runs/."""
    source, options = need_task(chosen_task, "compare")
    choices = {
        "batch": given.batch,
        "precision": given.precision,
        "workers": given.workers,
        "threads": given.threads,
        "data": given.data,
        "seed": given.seed,
        "name": given.name,
        "out": given.out,
        "options": options,
    }
    if given.links is not None:
        _compare_links(_link_request(source, given.links, choices, given), output)
    else:
        _compare_strategies(_request(source, choices, given), output)


def _request(source: str, choices: dict[str, Any], given: CompareOptions) -> CompareRequest:
    from evenstep.compare.compare_strategies import CompareRequest

    return CompareRequest(
        source=source,
        strategies=given.strategies,
        devices=given.devices,
        rounds=given.rounds,
        steps=given.steps,
        sync_batchnorm=given.sync_batchnorm,
        virtual_replicas=given.virtual_replicas,
        shares=given.shares,
        mesh=given.mesh,
        accumulate=given.accumulate,
        schedules=given.pipeline_schedule,
        choices=choices,
        command=shlex.join(["evenstep", *sys.argv[1:]]),
    )


def _link_request(source: str, links: str, choices: dict[str, Any], given: CompareOptions) -> LinkRequest:
    """What `--links` compares."""
    from evenstep.compare.compare_links import LinkRequest

    devices = given.devices
    return LinkRequest(
        source=source,
        links=links,
        # Of several numbers, the last.
        devices=devices.rpartition(",")[2] if devices.replace(",", "").isdigit() else devices,
        seeds=given.seeds,
        target=given.target,
        choices={**choices, "steps": given.steps},
    )


def _compare_strategies(request: CompareRequest, output: OutputOptions) -> None:
    from evenstep.compare.compare_strategies import compare as measure
    from evenstep.report.terminal import show_comparison

    with progress(quiet=output.quiet) as log:
        comparison, folder = measure(request, log)
    page, why_not = _page(comparison, folder)
    if output.as_json:
        print(json.dumps({**dataclasses.asdict(comparison), "folder": str(folder), "page": page}))
        return
    console = Console(highlight=False, emoji=False)
    show_comparison(comparison, console)
    console.print(f"\npage  {page or why_not}", markup=False, soft_wrap=True)


def _page(comparison: Comparison, folder: Path) -> tuple[str | None, str]:
    """The path of the page, or why there is none: what was measured must not be lost for want of a library."""
    from evenstep.report.html.page import write_page

    try:
        return str(write_page(comparison, folder)), ""
    except BadInput as error:
        return None, f"was not written: {error}; then run evenstep report {folder}"


def _compare_links(request: LinkRequest, output: OutputOptions) -> None:
    from evenstep.compare.compare_links import compare_links, link_lines
    from evenstep.report.terminal import print_table, table_of

    with progress(quiet=output.quiet) as log:
        comparison, folder = compare_links(request, log)
    if output.as_json:
        print(json.dumps({**dataclasses.asdict(comparison), "folder": str(folder)}))
        return
    console = Console(highlight=False, emoji=False)
    table = table_of("link", "steps", "seconds", "gain", "train loss", "valid loss")
    for cells in link_lines(comparison):
        table.add_row(*cells)
    print_table(table, console)
    target = f"steps and seconds until the train loss is {comparison.target:.4g}"
    console.print(f"\n{target}; runs in {folder}", markup=False, soft_wrap=True)
