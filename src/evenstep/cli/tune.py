"""`evenstep tune`: one search over the options of a task, on many devices."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from evenstep.cli.app import (
    BatchOption,
    DataOption,
    OptionsArgument,
    OutputOptions,
    PrecisionOption,
    TaskArgument,
    ThreadsOption,
    WorkersOption,
    app,
    fields_as_options,
)
from evenstep.cli.completion import complete_run, complete_strategy
from evenstep.cli.settings import TaskArguments, choose_task
from evenstep.errors import BadInput, TrainingError
from evenstep.strategy_facts import one_of, usual_strategies

if TYPE_CHECKING:
    from evenstep.tune.scheduler import TuneCommand
    from evenstep.tune.successive_halving import Study

EXAMPLES = """
[bold]Examples[/bold]

evenstep tune my_task.py --search lr=1e-4..1e-1:log --search width=64,128,256 --trials 32 --devices 4

evenstep tune my_task.py --search lr=1e-4..1e-1:log --trials 24 --devices 2 --rungs 1,3,9 --metric accuracy:max

evenstep tune my_task.py depth=3 --search width=64,128 --search lr=0.1,0.01 --sampler grid

evenstep tune --show runs/my_task-tune
"""


@dataclass(frozen=True)
class TuneOptions:
    """Arguments and options of `evenstep tune`."""

    task: TaskArgument = None
    options: OptionsArgument = None
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="An option of the task and its values: lr=1e-4..1e-1:log, layers=1..4 or width=64,128,256; repeat for "
            "each option. Default: what the task's annotations say.",
        ),
    ] = None
    trials: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of trials; default: 16, or the whole grid.")
    ] = None
    devices: Annotated[
        str,
        typer.Option(
            metavar="N|LIST",
            help="Number of devices, or a list such as cuda:0,cuda:1; a GPU listed twice runs two trials.",
        ),
    ] = "1"
    per_trial: Annotated[int, typer.Option(metavar="N", min=1, help="Devices per trial.")] = 1
    per_device: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Trials that share a device; auto: as many as fit in its memory, by the forecast of evenstep fit.",
        ),
    ] = "1"
    rungs: Annotated[
        str | None,
        typer.Option(
            metavar="EPOCHS,EPOCHS,...",
            help="Successive halving: epochs at which trials are compared, such as 1,3,9; the best continue, up to the "
            "last.",
        ),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC[:min|:max]",
            help="Validation metric to optimize, such as accuracy or score:max; default: loss.",
        ),
    ] = None
    sampler: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="tpe, gp, cmaes or random, by Optuna; or grid: every combination of choices."
        ),
    ] = "tpe"
    prune: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Pruner that chooses which trials continue at each of --rungs: halving (successive halving), or "
            "Optuna's median or hyperband. The others are paused.",
        ),
    ] = "halving"
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Seed of the suggestions, and of the weights and sample order of all trials."
        ),
    ] = 0
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Strategy of trials on several devices: {one_of(usual_strategies())}.",
            autocompletion=complete_strategy,
        ),
    ] = None
    virtual_replicas: Annotated[
        int | None,
        typer.Option(
            metavar="V",
            help="Virtual replicas of each trial: bit-identical results on any number of devices up to V, so that the "
            "last trials of a study can use all of them.",
        ),
    ] = None
    batch: BatchOption = None
    epochs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Epochs per trial, without --rungs; default: the task's."),
    ] = None
    precision: PrecisionOption = None
    data: DataOption = None
    workers: WorkersOption = None
    threads: ThreadsOption = None
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the study's folder; default: the task and the options that are given, such as "
            "my_task-depth=3-tune. The same command continues it.",
        ),
    ] = None
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder in which the study's folder is created; default: runs.")
    ] = None
    show: Annotated[
        Path | None,
        typer.Option(metavar="STUDY", help="Show an existing study, and write its page.", autocompletion=complete_run),
    ] = None


@app.command(epilog=EXAMPLES)
@fields_as_options
def tune(given: TuneOptions, output: OutputOptions) -> None:
    """Search a task's hyperparameters in many trials on your devices; with --rungs, only the best continue.

    Exit code 1 if no trial has a result.
    """
    if given.show is not None:
        if given.task is not None:
            raise BadInput("--show shows a study that is there; leave the task out")
        _show(given.show, as_json=output.as_json)
        return
    _finish(*_run(_command(given), quiet=output.quiet), as_json=output.as_json)


def _command(given: TuneOptions) -> TuneCommand:
    from evenstep.tune.scheduler import TuneCommand

    task, options = choose_task(TaskArguments(given.task, given.options), "tune")
    if task is None:
        raise BadInput("no task given; try: evenstep tune my_task.py --search lr=1e-4..1e-1:log")
    return TuneCommand(
        task=task,
        search=given.search or [],
        trials=given.trials,
        devices=given.devices,
        per_trial=given.per_trial,
        per_device=given.per_device,
        rungs=given.rungs,
        metric=given.metric,
        sampler=given.sampler,
        pruner=given.prune,
        seed=given.seed,
        choices={
            "strategy": given.strategy,
            "batch": given.batch,
            "epochs": given.epochs,
            "precision": given.precision,
            "data": given.data,
            "workers": given.workers,
            "threads": given.threads,
            "virtual_replicas": given.virtual_replicas,
            "options": options,
        },
        name=given.name,
        out=given.out,
        command=shlex.join(["evenstep", *sys.argv[1:]]),
    )


def _run(command: TuneCommand, *, quiet: bool) -> tuple[Study, Path]:
    from evenstep.tune.scheduler import Scheduler, begin
    from evenstep.tune.study_table import StudyProgress

    start = begin(command)
    log = start.log
    if log.study.is_over:
        log.close()
        return log.study, log.folder
    try:
        scheduler = Scheduler(log, start.devices)
        with StudyProgress(log.study, quiet) as shown:
            for line in (*start.notes, log.described):
                shown.show(line, ())
            for line in scheduler.run():
                shown.show(line, scheduler.running)
    finally:
        log.close()
    return log.study, log.folder


def _show(folder: Path, *, as_json: bool) -> None:
    from evenstep.tune.study import read_study

    _finish(read_study(folder), folder, as_json=as_json)


def _finish(study: Study, folder: Path, *, as_json: bool) -> None:
    from evenstep.report.terminal import print_table
    from evenstep.tune.study_table import result_lines, study_table, to_json

    page, why_not = _page(study, folder)
    if as_json:
        print(json.dumps({**to_json(study, folder), "page": page}))
    else:
        console = Console(highlight=False, emoji=False)
        print_table(study_table(study), console)
        for line in (*result_lines(study, folder), f"page       {page or why_not}"):
            console.print(line, markup=False, soft_wrap=True)
    if study.is_over and study.best is None:
        raise typer.Exit(TrainingError.exit_code)


def _page(study: Study, folder: Path) -> tuple[str | None, str]:
    """The path of the page, or why there is none: a study must not be lost for want of a library."""
    from evenstep.tune.study_page import write_study_page

    try:
        return str(write_study_page(study, folder)), ""
    except BadInput as error:
        return None, f"was not written: {error}; then run evenstep tune --show {folder}"
