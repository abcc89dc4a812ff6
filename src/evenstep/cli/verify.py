"""`evenstep verify`: does each strategy match training on one device?"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from evenstep.cli.app import (
    BatchOption,
    DataOption,
    MeshOption,
    OutputOptions,
    app,
    fields_as_options,
    flag,
    print_notes,
    progress,
)
from evenstep.cli.settings import TaskArguments, need_task
from evenstep.errors import EvenstepError, PlanError
from evenstep.strategy_facts import REFERENCE, STRATEGIES, usual_strategies
from evenstep.typed_values import check

if TYPE_CHECKING:
    from evenstep.launcher.prepare import Prepared
    from evenstep.verify import Configuration, Verdict
    from evenstep.verify.run_configurations import Log

USUAL_REPLICAS = 4

EXAMPLES = """
[bold]Examples[/bold]

evenstep verify digits

evenstep verify my_task.py --strategies ddp --devices 2,3

evenstep verify my_task.py --strategies ddp,fsdp --sync-batchnorm

evenstep verify my_task.py --accumulate 2 --precision bf16 --json

evenstep verify my_task.py --exact --virtual-replicas 4 --devices 2,4
"""


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `evenstep verify`."""

    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help=f"Comma-separated: {', '.join(STRATEGIES)}; "
            f"default: {','.join(row.name for row in usual_strategies())}.",
        ),
    ] = None
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N,...|LIST",
            help="Device counts such as 2,3, or a list such as cuda:0,cuda:1; default: all GPUs, else cpu,cpu.",
        ),
    ] = None
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps to compare.")] = 4
    batch: BatchOption = None
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Precision to check besides fp64, which is always checked: fp32 (default), tf32, bf16 or fp16.",
        ),
    ] = None
    accumulate: Annotated[
        int, typer.Option(metavar="N", help="Micro-batches per optimizer step, under every strategy.")
    ] = 1
    shares: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Each device's share of every batch, under every strategy.")
    ] = None
    mesh: MeshOption = None
    pipeline_schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Orders of forward and backward passes in a pipeline, a row for each: 1f1b, gpipe, interleaved, "
            "zero-bubble.",
        ),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="How ddp on CPUs sends gradients: see train --link."),
    ] = None
    sync_batchnorm: Annotated[
        bool, flag("--sync-batchnorm", help="Use SyncBatchNorm, where the strategy has several processes.")
    ] = False
    exact: Annotated[
        bool,
        flag(
            "--exact",
            help="Train with virtual replicas in the task's own precision, and require bit-identical results; if they "
            "are not, name the first operation that differs.",
        ),
    ] = False
    virtual_replicas: Annotated[
        int | None,
        typer.Option(metavar="V", help="Virtual replicas, with --exact; default: 4, or one for each device."),
    ] = None
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Seed of weights, sample order and augmentation; default: 0.")
    ] = None
    data: DataOption = None
    keep: Annotated[bool, flag("--keep", help="Keep the runs that were compared.")] = False
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder for the runs that are compared; default: runs."),
    ] = None


@app.command(epilog=EXAMPLES)
@fields_as_options
def verify(chosen_task: TaskArguments, given: VerifyOptions, output: OutputOptions) -> None:
    """Check that each strategy matches training on one device; if not, show where it differs and why (exit code 1)."""
    from evenstep.plan import RUNS, Whole

    task, options = need_task(chosen_task, "verify")
    check("steps", given.steps, Whole, PlanError)
    check("accumulate", given.accumulate, Whole, PlanError)
    from evenstep.launcher.prepare import load_strategies
    from evenstep.verify import settled

    load_strategies(given.strategies, task, given.seed)
    request = _request_of(task, given)
    is_first = not os.path.exists(given.out or RUNS)
    prepared = _prepared(request, options, is_first)
    started = time.monotonic()
    verdicts: dict[Configuration, Verdict] = {}
    print_notes(prepared.notes)
    try:
        # An estimate: looking for a cause takes more runs.
        with progress(2 + 4 * len(request.configs), output.quiet) as log:
            for config, verdict in _judged(prepared, request, log):
                verdicts[config] = verdict
    finally:
        if not given.keep:
            _remove(prepared.folder, is_first)
        if verdicts:
            # Also if a later configuration fails: the verdicts reached before are shown before the error.
            _show(_Checked(request, prepared, settled(verdicts), time.monotonic() - started), output.as_json)
    if not all(verdict.is_same for verdict in verdicts.values()):
        raise typer.Exit(EvenstepError.exit_code)


@dataclass(frozen=True)
class _Request:
    """What to compare with one device."""

    task: str
    given: VerifyOptions
    configs: Sequence[Configuration]
    virtual_replicas: int | None
    """With --exact."""


@dataclass(frozen=True)
class _Checked:
    """What was compared, as far as it was, and with which result."""

    request: _Request
    prepared: Prepared
    verdicts: Mapping[Configuration, Verdict]
    seconds: float


def _request_of(task: str, given: VerifyOptions) -> _Request:
    from evenstep.verify.configurations import configs_of, with_link, with_mesh, with_schedules

    arranged = with_mesh(configs_of(given.strategies, given.devices, given.accumulate, given.shares), given.mesh)
    configs = with_link(with_schedules(arranged, given.pipeline_schedule), given.link)
    virtual = _virtual_replicas(given, max(len(config.devices) for config in configs))
    if virtual is not None:
        configs = [config for config in configs if config.strategy != REFERENCE]
    return _Request(task, given, configs, virtual)


def _prepared(request: _Request, options: Mapping[str, Any], is_first: bool) -> Prepared:
    """The run on one device, once the plans of all others are checked."""
    from evenstep.launcher.prepare import free_name, label_of, prepare
    from evenstep.plan import RUNS
    from evenstep.verify.configurations import plan_of

    given = request.given
    choices = {
        "batch": given.batch,
        "precision": given.precision,
        "seed": given.seed,
        "data": given.data,
        "options": options,
        "out": given.out,
        "name": free_name(label_of(request.task, options), "verify", given.out or RUNS),
        "devices": request.configs[0].devices[0],
        "strategy": REFERENCE,
    }
    prepared = prepare(request.task, choices)
    try:
        for config in request.configs:
            plan_of(replace(prepared.plan, virtual_replicas=request.virtual_replicas), config)
    except PlanError:
        _remove(prepared.folder, is_first)
        raise
    return prepared


def _judged(prepared: Prepared, request: _Request, log: Log) -> Iterator[tuple[Configuration, Verdict]]:
    from evenstep.verify import Depth, ExactDepth, judged, judged_exactly

    given = request.given
    if request.virtual_replicas is None:
        depth = Depth(given.steps, sync_batchnorm=given.sync_batchnorm, from_single=True, log=log)
        return judged(prepared, request.configs, prepared.folder, depth)
    exact = ExactDepth(request.virtual_replicas, given.steps, log)
    return judged_exactly(prepared, request.configs, prepared.folder, exact)


def _virtual_replicas(given: VerifyOptions, most_devices: int) -> int | None:
    """With --exact, the number of virtual replicas."""
    from evenstep.plan import Whole

    if not given.exact:
        if given.virtual_replicas is not None:
            raise PlanError("--virtual-replicas is for verify --exact, which compares bits; add --exact")
        return None
    if given.sync_batchnorm:
        raise PlanError("--sync-batchnorm sums over processes in any order; with --exact leave it out")
    if given.virtual_replicas is None:
        return max(USUAL_REPLICAS, most_devices)
    check("virtual_replicas", given.virtual_replicas, Whole, PlanError)
    return given.virtual_replicas


def _remove(folder: Path, is_first: bool) -> None:
    """The runs; and the folder around them, if there was none before and nobody else has put anything there."""
    shutil.rmtree(folder, ignore_errors=True)
    if is_first:
        with suppress(OSError):
            folder.parent.rmdir()


def _show(found: _Checked, as_json: bool) -> None:
    from evenstep.report.terminal import print_table, without_control
    from evenstep.verify.verdict_table import lines, table

    if as_json:
        print(json.dumps(_values(found)))
        return
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    print_table(table(found.verdicts), console)
    request, batch = found.request, found.prepared.plan.batch
    for line, style in lines(found.verdicts, request.configs, batch, found.seconds, request.virtual_replicas):
        console.print(without_control(line), style=style, markup=False)
    if request.given.keep:
        console.print(f"the runs are in {found.prepared.folder}", style="dim", markup=False)


def _values(found: _Checked) -> dict[str, Any]:
    request, prepared, verdicts = found.request, found.prepared, found.verdicts
    return {
        "task": request.task,
        "is_same": len(verdicts) == len(request.configs) and all(verdict.is_same for verdict in verdicts.values()),
        "batch": prepared.plan.batch,
        "precision": prepared.plan.precision,
        "virtual_replicas": request.virtual_replicas,
        "seconds": round(found.seconds, 2),
        "runs": str(prepared.folder) if request.given.keep else None,
        "ways": [
            {
                "way": config.label,
                "strategy": config.strategy,
                "devices": list(config.devices),
                "accumulate": config.accumulate,
                "shares": config.shares,
                "mesh": config.mesh,
                "pipeline_schedule": config.schedule,
                **verdict.to_json(),
            }
            for config, verdict in verdicts.items()
        ],
    }
