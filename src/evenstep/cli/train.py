"""`evenstep train`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from evenstep.cli.app import (
    BatchOption,
    CheckpointActivationsOption,
    CpuOffloadOption,
    DataOption,
    MachinesOption,
    MeshOption,
    OutputOptions,
    PrecisionOption,
    RendezvousOption,
    SeedOption,
    ThreadsOption,
    WorkersOption,
    app,
    error_console,
    fields_as_options,
    flag,
    print_notes,
    print_whole,
    progress,
    without_nan,
)
from evenstep.cli.completion import complete_run, complete_strategy
from evenstep.cli.settings import TaskArguments, choose_task
from evenstep.errors import BadInput, shorten
from evenstep.mesh import take_sizes
from evenstep.strategy_facts import DEFAULT, REFERENCE, STRATEGIES, one_of, usual_strategies

if TYPE_CHECKING:
    from evenstep.launcher.prepare import Prepared
    from evenstep.record import Summary

NOT_IN_PLAN = ("suggest", "on")
"""Options of how the command is run; the others are choices for the Plan."""
_SUMMARIES = "\n\n".join(f"{row.name}: {row.summary}" for row in STRATEGIES.values())
TRAIN_EXAMPLES = f"""
[bold]Strategies[/bold]

{_SUMMARIES}

[bold]Examples[/bold]

evenstep train digits

evenstep train digits --strategy ddp --devices 2

evenstep train my_task.py lr=0.1 width=128 --devices 2

evenstep train --config run.toml --batch 256

evenstep train my_task.py --strategy fsdp --devices 4 --batch 512 --epochs 10 --precision bf16

evenstep train --resume runs/2026-11-15-digits-ddp --epochs 20

evenstep train my_task.py --on ray --devices 8
"""


@dataclass(frozen=True)
class TrainOptions:
    """Options of `evenstep train`."""

    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{one_of(STRATEGIES.values())}, see below; default: {REFERENCE} on one device, {DEFAULT} on several.",
            autocompletion=complete_strategy,
        ),
    ] = None
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N|LIST",
            help="Number of devices, or a list such as cuda:0,cuda:1 or cpu,cpu; default: 1, or all GPUs with "
            f"--strategy {one_of(usual_strategies())}.",
        ),
    ] = None
    mesh: MeshOption = None
    shards: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tensor-parallel size: ranks that split the layers of a replica; --shards 2 is --mesh tensor=2.",
        ),
    ] = None
    stages: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Pipeline-parallel size: ranks that divide a replica's blocks; --stages 2 is --mesh pipeline=2.",
        ),
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
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the data; default: the task's.")] = None
    steps: Annotated[int | None, typer.Option(metavar="N", help="Number of optimizer steps, instead of epochs.")] = None
    seed: SeedOption = None
    precision: PrecisionOption = None
    accumulate: Annotated[
        int | None, typer.Option(metavar="N", help="Micro-batches per optimizer step; default: 1.")
    ] = None
    micro: Annotated[
        str | None,
        typer.Option(
            metavar="auto",
            help="auto: before training, choose the smallest --accumulate with which a step fits in memory (see "
            "evenstep fit).",
        ),
    ] = None
    shares: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...|auto",
            help="Each device's share of every batch, such as 5,3, for devices of unequal speed; auto: measured in the "
            "first steps. Default: equal.",
        ),
    ] = None
    virtual_replicas: Annotated[
        int | None,
        typer.Option(
            metavar="V",
            help="Split each batch into V virtual replicas, whose gradients are summed in a fixed order: bit-identical "
            "results on any number of devices up to V.",
        ),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="How ddp on CPUs sends gradients over a slow network: none (plain DDP), auto (the fastest exact "
            "method, measured), bf16, powersgd:RANK, topk:FRACTION, local:STEPS, diloco:STEPS or "
            "streaming:STEPS[:N], in N fragments (4 if omitted); default: exact sums, sent once per machine.",
        ),
    ] = None
    clip: Annotated[
        float | None,
        typer.Option(metavar="NORM", help="Maximum norm for gradient clipping; inf: only record the norm."),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the run folder, runs/NAME; default: from date, task, options and strategy.",
        ),
    ] = None
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder in which the run folder is created; default: runs, or where the resumed run is."
        ),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Save a checkpoint every STEPS steps, as well as after each epoch."),
    ] = None
    keep: Annotated[
        int | None, typer.Option(metavar="N", help="Recent checkpoints to keep, besides the best; default: 2.")
    ] = None
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Run folder or checkpoint to resume (TASK may be left out), or a weights file to start from; auto: "
            "continue the run of --name, if it has begun.",
            autocompletion=complete_run,
        ),
    ] = None
    data: DataOption = None
    plan: Annotated[
        str | None, typer.Option(metavar="FILE", help="plan.json of a run to repeat; other options override it.")
    ] = None
    workers: WorkersOption = None
    resident: Annotated[bool | None, flag("--resident", help="Keep a dataset of tensors on the device.")] = None
    audit: Annotated[
        bool | None,
        flag("--audit", help="Record the samples of each step, and report any that were repeated or missed."),
    ] = None
    threads: ThreadsOption = None
    deterministic: Annotated[bool | None, flag("--deterministic", help="Use deterministic algorithms only.")] = None
    cudnn_benchmark: Annotated[bool | None, flag("--cudnn-benchmark", help="Let cuDNN benchmark algorithms.")] = None
    compile: Annotated[bool | None, flag("--compile", help="Use torch.compile.")] = None
    fast: Annotated[
        str | None,
        typer.Option(
            metavar="MODE", help="auto (default): capture and replay steps as CUDA graphs where that is safe; or off."
        ),
    ] = None
    channels_last: Annotated[
        bool | None, flag("--channels-last", help="Use the channels_last memory format for images.")
    ] = None
    checkpoint_activations: CheckpointActivationsOption = None
    cpu_offload: CpuOffloadOption = None
    suggest: Annotated[
        bool, flag("--suggest", help="Do not train: measure options that may be faster, and show their gain.")
    ] = False
    sync_batchnorm: Annotated[
        bool | None, flag("--sync-batchnorm", help="Use SyncBatchNorm, where the strategy has several processes.")
    ] = None
    allow_pickle: Annotated[
        bool | None,
        flag(
            "--allow-pickle",
            help="Allow weights files that torch.load refuses with weights_only=True: unpickling them can run code.",
        ),
    ] = None
    restarts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Restart from the last checkpoint after up to N crashes; default: 0."),
    ] = None
    stall_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="End a run that makes no progress for SECONDS; default: 20 times the longest pause between two steps "
            "so far, at least 120.",
        ),
    ] = None
    check_every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS", help="Check every STEPS steps that all replicas are equal; default: 100; 0: never."
        ),
    ] = None
    check_collectives: Annotated[
        bool | None, flag("--check-collectives", help="Check that all ranks call the same collectives; slow.")
    ] = None
    replay_every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="Every STEPS steps, recompute one micro-batch on all devices, twice on each, and compare bits, to "
            "detect faulty devices.",
        ),
    ] = None
    machines: MachinesOption = None
    rendezvous: RendezvousOption = None
    on: Annotated[
        str | None,
        typer.Option(
            metavar="ray", help="ray: let Ray choose the nodes for --devices N, and continue when one is lost."
        ),
    ] = None
    requeue: Annotated[
        bool | None, flag("--requeue", help="Under Slurm: when preempted, save a checkpoint and requeue the job.")
    ] = None
    statistics: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="Every STEPS steps, record mean, deviation and norm of parameters, gradients and outputs of layers.",
        ),
    ] = None
    profile: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Trace STEPS steps on all ranks with torch.profiler, into one timeline."),
    ] = None
    log: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Trackers that get all values: tensorboard, wandb, mlflow, trackio; a separate process feeds each.",
        ),
    ] = None
    evaluate_every: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Evaluate every STEPS steps and at the end, instead of after each epoch."),
    ] = None
    evaluate_first: Annotated[bool | None, flag("--evaluate-first", help="Evaluate before the first step too.")] = None
    best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC[:min|:max]",
            help="Metric that chooses the best checkpoint, such as accuracy or score:max; default: loss.",
        ),
    ] = None
    stop_after: Annotated[
        int | None,
        typer.Option(metavar="N", help="Stop after N evaluations without a better value of the --best metric."),
    ] = None


@app.command(epilog=TRAIN_EXAMPLES)
@fields_as_options
def train(chosen_task: TaskArguments, given: TrainOptions, output: OutputOptions) -> None:
    """Train a task on one device or many."""
    task, choices = _choices(chosen_task, given)
    if given.on is not None:
        raise typer.Exit(_train_on(given.on, task, choices))
    if given.suggest:
        _suggest(task, choices, output.as_json)
    else:
        _train(task, choices, output)


def _choices(chosen_task: TaskArguments, given: TrainOptions) -> tuple[str | None, dict[str, Any]]:
    """The task, and what was chosen for the Plan."""
    choices = {name: value for name, value in dataclasses.asdict(given).items() if name not in NOT_IN_PLAN}
    take_sizes(choices)
    task, choices["options"] = choose_task(chosen_task)
    return task, choices


def _train(task: str | None, choices: dict[str, Any], output: OutputOptions) -> None:
    from evenstep.launcher.launch import prepare_run, watch

    prepared, connection = prepare_run(task, choices)
    print_notes(prepared.notes)
    if connection.is_head and not output.as_json and not output.quiet:
        _show_plan(prepared)
    record = watch(prepared, connection, "messages" if output.quiet else "all", is_command=True)
    if connection.is_head:
        assert record.summary is not None
        _finish(record.summary, output.as_json)


def _show_plan(prepared: Prepared) -> None:
    from evenstep.report.terminal import batch_in_words

    errors = error_console()
    errors.print(prepared.plan.describe(), style="dim", markup=False)
    errors.print(f"\n{batch_in_words(prepared.plan, prepared.lengths)}", style="bold", markup=False)


def _train_on(cluster: str, task: str | None, choices: dict[str, Any]) -> int:
    """Have the same command run by a cluster; returns its exit code."""
    if cluster != "ray":
        raise BadInput(f"--on is {shorten(repr(cluster))}; the only choice is ray")
    if choices["machines"] is not None:
        raise BadInput("with --on ray, Ray chooses the machines; leave out --machines, and give --devices N")
    from evenstep.clusters.on_ray import train_on_ray
    from evenstep.launcher.prepare import free_name, label_of
    from evenstep.plan import RUNS

    words = without_options(sys.argv[2:], "--on", "--devices")
    if choices["name"] is None:
        words += ["--name", free_name(label_of(task or "resumed"), cluster, choices["out"] or RUNS)]
    return train_on_ray(words, choices["devices"])


def without_options(words: Sequence[str], *names: str) -> list[str]:
    """A command line without some options and their values."""
    kept, skips = [], False
    for word in words:
        if not skips and word.partition("=")[0] not in names:
            kept.append(word)
        skips = not skips and word in names
    return kept


def _suggest(task: str | None, choices: dict[str, Any], as_json: bool) -> None:
    from evenstep.compare.faster_options import suggest
    from evenstep.report.terminal import show_suggestions

    with progress() as log:
        found = suggest(task, choices, log)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found]))
        return
    command = " ".join(["evenstep", *(word for word in sys.argv[1:] if word != "--suggest")])
    show_suggestions(found, command, Console(highlight=False, emoji=False))


def _finish(summary: Summary, as_json: bool) -> None:
    from evenstep.report.terminal import summary_table, without_control

    if as_json:
        print(json.dumps(without_nan(dataclasses.asdict(summary))))
        return
    console = Console(highlight=False, emoji=False)
    if summary.shown:
        console.print(without_control(summary.shown), markup=False)
        console.print()
    restarts = len(list(Path(summary.run, "logs").glob("restart*")))
    print_whole(summary_table(summary, restarts), console)
    if summary.audit is not None:
        console.print(summary.audit["sentence"], markup=False, soft_wrap=True)
