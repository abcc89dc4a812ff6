"""`evenstep verify`: does each strategy match training on one device?"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from evenstep.cli.app import (
    BatchOption,
    DataOption,
    JsonOption,
    MeshOption,
    OptionsArgument,
    QuietOption,
    TaskArgument,
    app,
    flag,
    print_notes,
    progress,
)
from evenstep.cli.settings import SettingsOption, need_task
from evenstep.errors import EvenstepError, PlanError
from evenstep.strategy_facts import REFERENCE, STRATEGIES, usual_strategies
from evenstep.typed_values import check

if TYPE_CHECKING:
    from evenstep.launcher.prepare import Prepared
    from evenstep.verify import Configuration, Verdict

USUAL_REPLICAS = 4

EXAMPLES = """
[bold]Examples[/bold]

evenstep verify digits

evenstep verify my_task.py --strategies ddp --devices 2,3

evenstep verify my_task.py --strategies ddp,fsdp --sync-batchnorm

evenstep verify my_task.py --accumulate 2 --precision bf16 --json

evenstep verify my_task.py --exact --virtual-replicas 4 --devices 2,4
"""


@app.command(epilog=EXAMPLES)
def verify(
    task: TaskArgument = None,
    options: OptionsArgument = None,
    settings: SettingsOption = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated: {', '.join(STRATEGIES)}; "
            f"default: {','.join(row.name for row in usual_strategies())}."
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Device counts such as 2,3, or a list such as cuda:0,cuda:1; default: all GPUs, else cpu,cpu."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 4,
    batch: BatchOption = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precision to check besides fp64, which is always checked: fp32 (default), tf32, bf16 or fp16."
        ),
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per optimizer step, under every strategy.")] = 1,
    shares: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Part of each device in every batch, under every strategy.")
    ] = None,
    mesh: MeshOption = None,
    pipeline_schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Orders in which a pipeline computes its micro-batches, a row for each: 1f1b, gpipe, interleaved, "
            "zero-bubble.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="How gradients are sent (train --link), where the strategy can."),
    ] = None,
    sync_batchnorm: Annotated[
        bool, flag("--sync-batchnorm", help="Use SyncBatchNorm, where the strategy has several processes.")
    ] = False,
    exact: Annotated[
        bool,
        flag(
            "--exact",
            help="Train with virtual replicas in the task's own precision, and demand the same bits; if not, name the "
            "first operation that differs.",
        ),
    ] = False,
    virtual_replicas: Annotated[
        int | None,
        typer.Option(metavar="V", help="Virtual replicas, with --exact; default: 4, or one for each device."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights, sample order and augmentation; default: 0.")
    ] = None,
    data: DataOption = None,
    keep: Annotated[bool, flag("--keep", help="Keep the runs that were compared.")] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder for the runs that are compared; default: runs."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check that each strategy matches training on one device; if not, show where it differs and why (exit code 1)."""
    from evenstep.plan import RUNS, Whole

    task, given = need_task(task, options, settings, "verify")
    check("steps", steps, Whole, PlanError)
    check("accumulate", accumulate, Whole, PlanError)
    from evenstep.launcher.prepare import free_name, label_of, load_strategies, prepare
    from evenstep.verify import Depth, ExactDepth, judged, judged_exactly, settled
    from evenstep.verify.configurations import configs_of, plan_of, with_link, with_mesh, with_schedules

    load_strategies(strategies, task, seed)
    arranged = with_mesh(configs_of(strategies, devices, accumulate, shares), mesh)
    configs = with_link(with_schedules(arranged, pipeline_schedule), link)
    virtual = _virtual_replicas(exact, virtual_replicas, sync_batchnorm, max(len(config.devices) for config in configs))
    if virtual is not None:
        configs = [config for config in configs if config.strategy != REFERENCE]
    choices = {
        "batch": batch,
        "precision": precision,
        "seed": seed,
        "data": data,
        "options": given,
        "out": out,
    }
    name = free_name(label_of(task, given), "verify", out or RUNS)
    is_first = not os.path.exists(out or RUNS)
    prepared = prepare(task, {**choices, "name": name, "devices": configs[0].devices[0], "strategy": REFERENCE})
    try:
        for config in configs:
            plan_of(replace(prepared.plan, virtual_replicas=virtual), config)
    except PlanError:
        _remove(prepared.folder, is_first)
        raise
    started = time.monotonic()
    verdicts: dict[Configuration, Verdict] = {}
    print_notes(prepared.notes)
    try:
        # An estimate: looking for a cause takes more runs.
        with progress(2 + 4 * len(configs), quiet) as log:
            if virtual is None:
                depth = Depth(steps, sync_batchnorm=sync_batchnorm, from_single=True, log=log)
                found = judged(prepared, configs, prepared.folder, depth)
            else:
                found = judged_exactly(prepared, configs, prepared.folder, ExactDepth(virtual, steps, log))
            for config, verdict in found:
                verdicts[config] = verdict
    finally:
        if not keep:
            _remove(prepared.folder, is_first)
        if verdicts:
            # Also if a later configuration fails: the verdicts reached before are shown before the error.
            shown = _Request(task, configs, time.monotonic() - started, keep, virtual)
            _show(prepared, settled(verdicts), shown, as_json)
    if not all(verdict.is_same for verdict in verdicts.values()):
        raise typer.Exit(EvenstepError.exit_code)


def _virtual_replicas(exact: bool, virtual_replicas: int | None, sync_batchnorm: bool, most_devices: int) -> int | None:
    """With --exact, the number of virtual replicas."""
    from evenstep.plan import Whole

    if not exact:
        if virtual_replicas is not None:
            raise PlanError("--virtual-replicas is for verify --exact, which compares bits; add --exact")
        return None
    if sync_batchnorm:
        raise PlanError("--sync-batchnorm sums over processes in any order; with --exact leave it out")
    if virtual_replicas is None:
        return max(USUAL_REPLICAS, most_devices)
    check("virtual_replicas", virtual_replicas, Whole, PlanError)
    return virtual_replicas


def _remove(folder: Path, is_first: bool) -> None:
    """The runs; and the folder around them, if there was none before and nobody else has put anything there."""
    shutil.rmtree(folder, ignore_errors=True)
    if is_first:
        with suppress(OSError):
            folder.parent.rmdir()


@dataclass(frozen=True)
class _Request:
    """The request, and how long it took."""

    task: str
    configs: Sequence[Configuration]
    seconds: float
    keep: bool
    virtual_replicas: int | None


def _show(prepared: Prepared, verdicts: Mapping[Configuration, Verdict], request: _Request, as_json: bool) -> None:
    from evenstep.report.terminal import print_table, without_control
    from evenstep.verify.verdict_table import lines, table

    if as_json:
        print(json.dumps(_values(prepared, verdicts, request)))
        return
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    print_table(table(verdicts), console)
    batch, unchecked = prepared.plan.batch, [config for config in request.configs if config not in verdicts]
    for line, style in lines(
        verdicts, len(request.configs), batch, request.seconds, request.virtual_replicas, unchecked
    ):
        console.print(without_control(line), style=style, markup=False)
    if request.keep:
        console.print(f"the runs are in {prepared.folder}", style="dim", markup=False)


def _values(prepared: Prepared, verdicts: Mapping[Configuration, Verdict], request: _Request) -> dict[str, Any]:
    return {
        "task": request.task,
        "is_same": len(verdicts) == len(request.configs) and all(verdict.is_same for verdict in verdicts.values()),
        "batch": prepared.plan.batch,
        "precision": prepared.plan.precision,
        "virtual_replicas": request.virtual_replicas,
        "seconds": round(request.seconds, 2),
        "runs": str(prepared.folder) if request.keep else None,
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
