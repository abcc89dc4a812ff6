"""The command `evenstep`: argv to one call. torch is imported inside commands, so that help is instant."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import evenstep
from evenstep.errors import BadInput, EvenstepError
from evenstep.task import BUILT_IN

if TYPE_CHECKING:
    from evenstep.audit import Audit

STOPPED = 130
TASKS = f"{', '.join(BUILT_IN)}; or your own: file.py, file.py:function, package.module:function."

# Typer keeps its name for "the command line is wrong" to itself; this public one is made from it.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="evenstep",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
checkpoint_app = typer.Typer(help="Look into checkpoints.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")

MachinesOption = Annotated[
    str | None, typer.Option(help="How many machines, such as 2, or the least and the most, such as 2:4.")
]
RendezvousOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="The first machine, and a free port on it.")
]

TRAIN_EXAMPLES = """
[bold]Examples[/bold]

evenstep train digits

evenstep train digits --strategy ddp --devices 2

evenstep train my_task.py --strategy fsdp --devices 4 --batch 512 --epochs 10 --precision bf16

evenstep train my_task.py --resume runs/2026-11-15-digits-ddp
"""

AUDIT_EXAMPLES = """
[bold]Examples[/bold]

evenstep train digits --audit --name mine

evenstep audit runs/mine

evenstep audit runs/mine runs/mine-resumed runs/mine-resumed-again
"""
SHOWN_PROBLEMS = 10


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"evenstep {evenstep.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train one PyTorch task, unchanged, on one device or many; every way learns the same thing."""


@app.command(epilog=TRAIN_EXAMPLES)
def train(
    task: Annotated[
        str | None,
        typer.Argument(help=TASKS),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="single, dp, ddp or fsdp; default: ddp if several devices.")
    ] = None,
    devices: Annotated[str | None, typer.Option(help="A count, or a list such as cuda:0,cuda:1 or cpu,cpu.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a step over all devices; default: the task's.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; default: the task's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of epochs.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order, dropout and augmentation; default: 0.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp64, fp32 (default), tf32, bf16 or fp16.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches per optimizer step; default: 1.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm, the same under all strategies.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the folder runs/NAME.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Also save every so many steps.")
    ] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints to keep, besides the best; default: 2.")] = None,
    resume: Annotated[str | None, typer.Option(help="A run, a checkpoint, or a file of weights.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder of the data, for tasks that take one.")] = None,
    plan: Annotated[str | None, typer.Option(help="Repeat the run of this plan.json.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Loader processes of a rank, for data that is not tensors; default: free cores."),
    ] = None,
    resident: Annotated[bool | None, typer.Option("--resident", help="Keep tensors on the device.")] = None,
    audit: Annotated[
        bool | None, typer.Option("--audit", help="Write which samples each step used, and count them.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Per process; default: cores shared out.")] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="Deterministic algorithms only.")
    ] = None,
    cudnn_benchmark: Annotated[bool | None, typer.Option("--cudnn-benchmark", help="Let cuDNN try algorithms.")] = None,
    compile: Annotated[bool | None, typer.Option("--compile", help="torch.compile the model.")] = None,
    sync_batchnorm: Annotated[
        bool | None, typer.Option("--sync-batchnorm", help="BatchNorm over all processes.")
    ] = None,
    allow_pickle: Annotated[
        bool | None, typer.Option("--allow-pickle", help="Load weights files that can run code.")
    ] = None,
    restarts: Annotated[int | None, typer.Option(help="Crashes after which to go on by itself; default: 0.")] = None,
    stall_after: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="End a run in which nothing moves; default: by its pace, from 120 up."),
    ] = None,
    check_every: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Compare the replicas so often; default: 100, 0: never.")
    ] = None,
    check_collectives: Annotated[
        bool | None, typer.Option("--check-collectives", help="Compare every collective between ranks; slow.")
    ] = None,
    machines: MachinesOption = None,
    rendezvous: RendezvousOption = None,
    requeue: Annotated[
        bool | None, typer.Option("--requeue", help="Under Slurm: when asked to stop, save and queue again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one line of JSON.")] = False,
) -> None:
    """Train a task."""
    choices = {key: value for key, value in locals().items() if key not in ("task", "as_json")}
    from evenstep.launcher.ready import get_ready
    from evenstep.launcher.train import watch

    ready = get_ready(task, choices)
    prepared = ready.prepared
    errors = Console(stderr=True, highlight=False, emoji=False)
    for line in prepared.said:
        errors.print(line, style="yellow", markup=False, soft_wrap=True)
    if not as_json and ready.is_first:
        errors.print(prepared.plan.describe(), style="dim", markup=False)
        errors.print(f"\n{prepared.arithmetic}", style="bold", markup=False)
    record = watch(ready, progress=True, is_command=True)
    if ready.is_first:
        _finish(record, as_json)


def _finish(record: Any, as_json: bool) -> None:
    from evenstep.report.progress import without_control
    from evenstep.report.table import summary_table

    summary = record.summary
    if as_json:
        values = dataclasses.asdict(summary)
        values["valid"] = {name: value if math.isfinite(value) else None for name, value in summary.valid.items()}
        print(json.dumps(values))
        return
    console = Console(highlight=False, emoji=False)
    if summary.shown:
        console.print(without_control(summary.shown), markup=False)
        console.print()
    console.print(summary_table(summary))
    if summary.audit is not None:
        console.print(summary.audit["sentence"], markup=False, soft_wrap=True)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A script written for torchrun, or with evenstep.join().")],
    devices: Annotated[int, typer.Option(help="How many processes, one for each device.")] = 1,
    module: Annotated[bool, typer.Option("--module", "-m", help="It is a module, as for python -m.")] = False,
    restarts: Annotated[int, typer.Option(help="Crashes after which to start it again.")] = 0,
    stall_after: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End it when nothing moves; default: 600.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start each process anew: for a script that sets torch's environment.")
    ] = False,
    machines: MachinesOption = None,
    rendezvous: RendezvousOption = None,
) -> None:
    """Run a script as several processes, as torchrun would; all that follows the script is the script's."""
    from evenstep.launcher.script import Script, run_script

    arguments = context.args[1:] if context.args[:1] == ["--"] else context.args
    run_script(Script(script, tuple(arguments), devices, module, fresh, restarts, stall_after, machines, rendezvous))


@app.command(epilog=AUDIT_EXAMPLES)
def audit(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="A run trained with --audit; or it and those resumed from it."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print as one line of JSON.")] = False,
) -> None:
    """Count the samples that a training repeated or missed, interrupted or not; exit code 1 if there are any."""
    from evenstep.audit import audit as read_and_count

    found = read_and_count(runs)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        _show_audit(found)
    if not found.is_clean:
        raise typer.Exit(EvenstepError.exit_code)


def _show_audit(found: Audit) -> None:
    from evenstep.report.progress import without_control

    lines = [(found.sentence(), "bold")]
    if found.redone:
        lines.append((f"{found.redone} more were lost when a run was cut off, and done again", "dim"))
    lines += [(problem, "red") for problem in found.problems[:SHOWN_PROBLEMS]]
    if found.num_problems > SHOWN_PROBLEMS:
        lines.append((f"and {found.num_problems - SHOWN_PROBLEMS} problems more", "red"))
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for line, style in lines:
        console.print(without_control(line), style=style, markup=False)


@checkpoint_app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A run folder or a checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as one line of JSON.")] = False,
) -> None:
    """Show what a checkpoint holds, after checking that it is whole."""
    from evenstep import checkpoint
    from evenstep.report.table import plain

    found, warnings = checkpoint.find(str(path))
    state = checkpoint.read_state(found)
    tensors = checkpoint.tensor_table(found / checkpoint.WEIGHTS)
    facts = {
        "checkpoint": str(found),
        "step": state["step"],
        "samples_seen": state["loader"]["position"],
        "samples_an_epoch": state["loader"]["num_samples"],
        "valid": state.get("valid", {}),
        "strategy": state.get("plan", {}).get("strategy"),
        "evenstep": state["evenstep"],
        "torch": state["torch"],
        "whole": True,
    }
    if as_json:
        weights = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in tensors.items()}
        print(json.dumps({**facts, "warnings": warnings, "weights": weights}))
        return
    console = Console(highlight=False, emoji=False)
    for warning in warnings:
        console.print(warning, style="yellow", markup=False)
    for key, value in facts.items():
        shown = ", ".join(f"{name} {number:.4f}" for name, number in value.items()) if key == "valid" else value
        console.print(f"{key.replace('_', ' '):<18} {shown or '-'}", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("weight", "type", "shape"):
        table.add_column(column)
    for name, (dtype, shape) in tensors.items():
        table.add_row(plain(name), plain(dtype), " x ".join(map(str, shape)) or "one number")
    console.print()
    console.print(table)


def main() -> None:
    """Run the command, and end with a code that means something: 0 done, 1 failed, 2 bad input, 130 stopped."""
    try:
        sys.exit(app(prog_name="evenstep", standalone_mode=False))
    except EvenstepError as error:
        _say_error(str(error))
        sys.exit(error.exit_code)
    except _USAGE_ERROR as error:
        _say_usage(error)
        sys.exit(BadInput.exit_code)
    except KeyboardInterrupt:
        _say_error("stopped")
        sys.exit(STOPPED)


def _say_usage(error: Any) -> None:
    """What is wrong with the command line; asked for nothing at all, Typer has shown the help already."""
    message = error.format_message().strip().rstrip(".")
    if message:
        command = error.ctx.command_path if error.ctx else "evenstep"
        _say_error(f"{message}{'' if message.endswith('?') else ';'} see {command} --help")


def _say_error(message: str) -> None:
    from evenstep.report.progress import without_control

    # emoji: ":100:" is a line number here, not a picture.
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    console.print("[bold red]error:[/bold red] ", end="")
    console.print(without_control(message), markup=False)
