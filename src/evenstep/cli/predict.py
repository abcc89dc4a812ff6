"""`evenstep predict`: what would n devices give, and how sure is that?"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console

from evenstep.cli.app import (
    BatchOption,
    DataOption,
    MeshOption,
    OutOption,
    OutputOptions,
    PrecisionOption,
    SeedOption,
    ThreadsOption,
    WorkersOption,
    app,
    fields_as_options,
    flag,
    print_notes,
    progress,
)
from evenstep.cli.completion import complete_run
from evenstep.errors import BadInput, EvenstepError, TaskError, shorten
from evenstep.strategy_facts import DEFAULT, STRATEGIES
from evenstep.task import BUILT_IN, find_task, split_spec

if TYPE_CHECKING:
    from evenstep.predict.forecast import Forecaster, Question
    from evenstep.predict.published import CheckResult
    from evenstep.record import Record
    from evenstep.report.prediction import Forecast

EXAMPLES = """
[bold]Examples[/bold]

evenstep predict my_task.py --devices 2,8,64 --link 25gbit

evenstep predict runs/2026-11-15-digits-compare --devices 4,16 --link 10gbit --strategies ddp,fsdp

evenstep predict runs/a --devices 8,64,1024 --link nvlink --link 400gbit --per-device 64 --price 2.5

evenstep predict my_task.py --strategies pipeline,tensor --devices 2,4,8 --accumulate 16

evenstep predict --check
"""


@dataclass(frozen=True)
class PredictOptions:
    """Arguments and options of `evenstep predict`."""

    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK|RUN",
            help="A task, which is measured first, or the folder of a run or comparison. With --check: a comparison.",
            autocompletion=complete_run,
        ),
    ] = None
    options: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=VALUE", help="Options of the task.", show_default=False)
    ] = None
    devices: Annotated[str, typer.Option(metavar="N,...", help="Device counts to predict.")] = "2,8,64"
    machines: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Machines for each device count, such as 1,1,8, or one number for all; default: 8 GPUs per machine.",
        ),
    ] = None
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="LINK",
            help="Network between machines (25gbit) or within one (nvlink, nvlink-h100, pcie), or seconds of latency "
            "and bytes per second, such as 2e-5,3e9; repeat to give both.",
        ),
    ] = None
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Another GPU than the measured one: v100, a100, h100 or h200.")
    ] = None
    strategies: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help=f"Comma-separated: {', '.join(STRATEGIES)}; default: {DEFAULT}."),
    ] = None
    batch: BatchOption = None
    per_device: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Samples per device, instead of a global batch that all devices share."),
    ] = None
    mesh: MeshOption = None
    accumulate: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Micro-batches per optimizer step under pipeline and tensor; default: 4 per pipeline stage; 1 for "
            "tensor.",
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
    parameters: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of model parameters, such as 25.6M, if the runs do not have it."),
    ] = None
    reads: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", min=0.001, help="Samples per second that one machine can read, for all its devices."
        ),
    ] = None
    price: Annotated[
        float | None,
        typer.Option(
            "--price", metavar="PRICE", min=0, help="Price of one device per hour: adds the cost of an epoch."
        ),
    ] = None
    hours_between_failures: Annotated[
        float | None,
        typer.Option(metavar="HOURS", min=0.001, help="Mean hours until one device fails: adds the cost of restarts."),
    ] = None
    precision: PrecisionOption = None
    workers: WorkersOption = None
    threads: ThreadsOption = None
    data: DataOption = None
    seed: SeedOption = None
    out: OutOption = None
    check: Annotated[
        bool,
        flag(
            "--check",
            help="Predict published scaling tables, or a comparison, and print the errors of the predictions.",
        ),
    ] = False


@app.command(epilog=EXAMPLES)
@fields_as_options
def predict(given: PredictOptions, output: OutputOptions) -> None:
    """Predict the speed on more devices from measured steps, with a 90 % interval; --check shows how accurate that is.

    Exit code 1 if nothing can be predicted.
    """
    if given.check:
        _check([word for word in (given.target, *(given.options or [])) if word], as_json=output.as_json)
        return
    if given.target is None:
        raise BadInput("give a task or a run: evenstep predict my_task.py --devices 2,8 --link 25gbit; or --check")
    # All options are checked before a task is measured.
    question, parameters, choices = _dividing(_question(given), given), _number(given.parameters), _choices(given)
    where = Path(given.target)
    if _is_run(given.target):
        _refuse_unused(given.options, choices)
        folder = where if where.is_dir() else where.parent
        _predict(_read(given.target), folder, question, parameters, as_json=output.as_json)
        return
    _refuse_unknown(given.target)
    with progress(quiet=output.quiet) as log:
        records, folder = _measure(given.target, given.options, question, {"batch": given.batch, **choices}, log)
    with _after_measuring(folder):
        _predict(records, folder, question, parameters, as_json=output.as_json)


def _choices(given: PredictOptions) -> dict[str, Any]:
    """For a measurement."""
    return {
        "precision": given.precision,
        "workers": given.workers,
        "threads": given.threads,
        "data": given.data,
        "seed": given.seed,
        "out": given.out,
    }


@contextmanager
def _after_measuring(folder: Path) -> Iterator[None]:
    """The exit code of bad input says that nothing was started; by now, something was."""
    try:
        yield
    except BadInput as error:
        raise EvenstepError(f"{error}\nto predict from what was measured: evenstep predict {folder}") from error


def _refuse_unknown(target: str) -> None:
    """What is no task may be the misspelt folder of a run."""
    where, name = split_spec(target)
    if where in BUILT_IN or name is not None or os.path.exists(where):
        return
    try:
        find_task(target)
    except TaskError as error:
        raise BadInput(f"{str(error).rstrip('.')}; a run or a comparison is given as its folder") from error


def _refuse_unused(options: list[str] | None, choices: dict[str, Any]) -> None:
    """What is chosen for a measurement says nothing about one that was made."""
    given = [*(options or []), *(f"--{name}" for name, value in choices.items() if value is not None)]
    if given:
        raise BadInput(
            f"{shorten(given[0])} is for a task that is measured, and a run was measured already; leave it out, or "
            "give the task"
        )


def _predict(records: list[Record], folder: Path, question: Question, parameters: int | None, *, as_json: bool) -> None:
    from evenstep.predict.calibration import calibrate
    from evenstep.predict.forecast import Forecaster
    from evenstep.predict.forecast_table import show_forecast
    from evenstep.predict.model_division import ModelDivision
    from evenstep.report.prediction import FOLDER

    calibration = calibrate(records, parameters, ModelDivision.beside(folder))
    forecaster = Forecaster(calibration, question, task=records[0].plan.task_name)
    found = forecaster.forecast(shlex.join(["evenstep", *sys.argv[1:]]))
    found = dataclasses.replace(found, notes=[*_doubts(folder), *found.notes])
    folder = _write(forecaster, found, folder / FOLDER)
    console = Console(highlight=False, emoji=False)
    if not as_json:
        # Before the page, which takes longer than all of the prediction.
        show_forecast(found, console)
        sys.stdout.flush()
    page, why_not = _page(folder)
    _update_comparison(folder.parent)
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "folder": str(folder), "page": page}))
    else:
        console.print(f"\npage  {page or why_not}", markup=False, soft_wrap=True)
    if not any(not row.is_measured for row in found.rows):
        raise typer.Exit(EvenstepError.exit_code)


def _doubts(folder: Path) -> list[str]:
    """The warning of a comparison about its times, if there is one."""
    from evenstep.report import comparison
    from evenstep.report.recommend import unsteady

    return unsteady(comparison.Comparison.read(folder)) if os.path.isfile(folder / comparison.FILE) else []


def _write(forecaster: Forecaster, found: Forecast, folder: Path) -> Path:
    """Beside what it was made from, never over it."""
    try:
        folder.mkdir(exist_ok=True)
        forecaster.write_records(folder, found)
        found.write(folder)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror}); copy the run to another folder") from error
    return folder


def _page(folder: Path) -> tuple[str | None, str]:
    from evenstep.report.html.forecast_page import write_forecast_page
    from evenstep.report.prediction import Forecast

    try:
        return str(write_forecast_page(Forecast.read(folder), folder)), ""
    except BadInput as error:
        return None, f"was not written: {error}; then run evenstep report {folder}"


def _update_comparison(folder: Path) -> None:
    """Where these are the Records of a comparison, its page shows what is predicted beside them."""
    from evenstep.report import comparison
    from evenstep.report.html.page import write_page

    if os.path.isfile(folder / comparison.FILE):
        with suppress(BadInput):
            write_page(comparison.Comparison.read(folder), folder)


def _question(given: PredictOptions) -> Question:
    from evenstep.predict.communication_cost import parse_link
    from evenstep.predict.forecast import GPUS, Question
    from evenstep.typed_values import check_choice

    counts = _counts("--devices", given.devices)
    machines = _machines(given.machines, counts) if given.machines else []
    strategies = _strategies(given.strategies)
    if given.gpu is not None:
        check_choice("GPU", given.gpu, GPUS, BadInput)
    if given.batch is not None and given.per_device is not None:
        raise BadInput("--batch is of all devices and --per-device of each; give one of them")
    return Question(
        devices=counts,
        machines=machines,
        strategies=strategies,
        links=[parse_link(text) for text in given.link or []],
        gpu=given.gpu,
        batch=given.batch,
        per_device=given.per_device,
        reads=given.reads,
        price=given.price,
        hours_between_failures=given.hours_between_failures,
    )


def _machines(text: str, devices: list[int]) -> list[int]:
    """For each number of devices, or one for all."""
    machines = _counts("--machines", text)
    if len(machines) not in (1, len(devices)):
        raise BadInput(f"--machines names {len(machines)} numbers and --devices {len(devices)}; give one, or as many")
    for number, count in zip(machines * (len(devices) if len(machines) == 1 else 1), devices, strict=True):
        if number > count:
            raise BadInput(f"--machines {number} is more than {count} devices; give at most one machine a device")
    return machines


def _strategies(text: str | None) -> list[str]:
    from evenstep.typed_values import check_choice

    names = [name.strip() for name in (text or DEFAULT).split(",") if name.strip()]
    for name in names:
        check_choice("strategy", name, STRATEGIES, BadInput)
    if not names:
        raise BadInput(f"--strategies is {text!r}; name at least one, such as {DEFAULT}")
    return names


def _dividing(question: Question, given: PredictOptions) -> Question:
    """With how ranks divide a model, for strategies under which they do."""
    from evenstep.mesh import has_axes, parse_mesh
    from evenstep.plan import ScheduleName
    from evenstep.predict.calibration import SHARDS_NOT_PREDICTED
    from evenstep.typed_values import check_choice

    mesh, accumulate, schedule = given.mesh, given.accumulate, given.pipeline_schedule
    if schedule is not None:
        check_choice("schedule", schedule, get_args(ScheduleName), BadInput)
    rows = [STRATEGIES[name] for name in question.strategies]
    dividing = [row for row in rows if row.model_axis is not None]
    for name, value in {"--mesh": mesh, "--accumulate": accumulate, "--pipeline-schedule": schedule}.items():
        if value is not None and not dividing:
            raise BadInput(f"{name} is for strategies that divide a model; add --strategies pipeline, or leave it out")
    if mesh is not None:
        row = next((row for row in dividing if has_axes(mesh, row)), dividing[0])
        if parse_mesh(mesh, row).get(row.shard_axis or "", 1) > 1:
            raise BadInput(f"--mesh {mesh}: {SHARDS_NOT_PREDICTED}; use data in place of {row.shard_axis}")
    chosen: Any = schedule or question.schedule
    return dataclasses.replace(question, mesh=mesh, accumulate=accumulate, schedule=chosen)


def _counts(flag_name: str, text: str) -> list[int]:
    """Distinct numbers such as 2,8,64."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,5}", part) for part in parts):
        raise BadInput(f"{flag_name} is {shorten(repr(text))}; write numbers from 1 to 999,999 such as 2,8,64")
    found = [int(part) for part in parts]
    return list(dict.fromkeys(found)) if flag_name == "--devices" else found


def _number(text: str | None) -> int | None:
    """A number of parameters: 25.6M, 7B, 110000000."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMB]?)", text.strip(), re.IGNORECASE)
    number = round(float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[found[2].upper()]) if found else 0
    if not number:
        raise BadInput(f"--parameters is {shorten(repr(text))}; write a number such as 25.6M or 7B")
    return number


def _is_run(target: str) -> bool:
    from evenstep.record import FILE

    where = Path(target)
    if os.path.isfile(where):
        return where.suffix == ".jsonl"
    # A folder may have the name of a built-in task; any other without a Record is an error that says so.
    return os.path.isdir(where) and (target not in BUILT_IN or any(where.glob(FILE)) or any(where.glob(f"*/{FILE}")))


def _read(target: str) -> list[Record]:
    from evenstep.predict.calibration import read_records

    return read_records(target)


def _measure(
    task: str, options: list[str] | None, question: Question, choices: dict[str, Any], log: Any
) -> tuple[list[Record], Path]:
    from evenstep.compare.compare_strategies import CompareRequest
    from evenstep.compare.measure_for_predict import measure_baseline, refuse_gpu
    from evenstep.task_options import parse_options

    if question.gpu is not None:
        refuse_gpu(question.gpu)
    given = {**choices, "options": parse_options(options or [])}
    request = CompareRequest(
        source=task,
        strategies=",".join(question.strategies),
        accumulate=question.accumulate or 1,
        schedules=question.schedule,
        choices=given,
    )
    return measure_baseline(request, log, _ranks(question))


def _ranks(question: Question) -> list[int]:
    """Of a replica, for every number of devices that a model can be divided over."""
    from evenstep.errors import PlanError
    from evenstep.mesh import arrange, has_axes

    found = []
    for row in (STRATEGIES[name] for name in question.strategies if STRATEGIES[name].model_axis is not None):
        mesh = question.mesh if question.mesh is not None and has_axes(question.mesh, row) else None
        for devices in question.devices:
            with suppress(PlanError):
                arranged = arrange(mesh, row, devices)
                found += [arranged.ranks_per_replica] if arranged is not None else []
    return found


def _check(folders: list[str], *, as_json: bool) -> None:
    from evenstep.predict.forecast_table import show_check
    from evenstep.predict.own_records import UNCHECKED, replay_records
    from evenstep.predict.published import check_published

    rows = {folder: list(replay_records(folder)) for folder in folders or _kept()}
    print_notes(f"{folder} has nothing to check: {UNCHECKED}" for folder in folders if not rows[folder])
    result = check_published([row for of_folder in rows.values() for row in of_folder])
    if as_json:
        print(json.dumps(_plain(result)))
        return
    show_check(result, Console(highlight=False, emoji=False))


def _kept() -> list[str]:
    """Comparisons in bench/results, in a copy of the repository."""
    return sorted(str(path.parent) for path in Path("bench/results").rglob("comparison.json"))


def _plain(result: CheckResult) -> dict[str, object]:
    return {**dataclasses.asdict(result), "rows": [dataclasses.asdict(row) for row in result.rows]}
