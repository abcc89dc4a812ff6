"""The runs of a folder, each with its state and result, from the first and the last rows of their Records."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from evenstep.best_metric import parse_best
from evenstep.errors import EvenstepError
from evenstep.plan import CUSTOM_LOOP, Plan, read_plan
from evenstep.record import FILE, STUDY_FILE, TRIALS, Evaluation, RunEnd, Start, Step, Summary, ends_of, is_written
from evenstep.report import comparison, prediction
from evenstep.report.terminal import number, plain

RunState = Literal[
    "running",
    "done",
    "stopped",
    "killed",
    "failed",
    "not started",
    "compared",
    "predicted",
    "study",
    "unreadable",
]
STYLES = {"running": "cyan", "done": "green", "killed": "red", "failed": "red", "unreadable": "red"}
MOST_RESULT = 40
"""Characters; --json has all of it."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One run, as `evenstep runs --json` prints it."""

    run: str
    state: RunState
    task: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    strategy: str | None = None
    devices: list[str] = field(default_factory=list)
    epochs: int | None = None
    """Of the plan; or `steps`."""
    steps: int | None = None
    epoch: int = 0
    step: int = 0
    """The last one that was recorded."""
    train_loss: float | None = None
    """Mean over the last epoch if it is done, else the loss of the last step."""
    valid: dict[str, float] = field(default_factory=dict)
    """The last evaluation."""
    best: dict[str, Any] | None = None
    trials: int | None = None
    """Of a study, when it is over; `suggested` is how many it has."""
    suggested: int = 0
    error: str | None = None
    changed: float = 0.0
    """Of the last row, in seconds since 1970."""


def list_runs(folder: Path) -> list[RunFacts]:
    """The runs and comparisons right below a folder; the one that changed last comes last."""
    found = [_facts(one) for one in sorted(folder.iterdir()) if one.is_dir() and _is_run(one)]
    return sorted(found, key=lambda one: one.changed)


def _is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in (FILE, "plan.json", comparison.FILE, STUDY_FILE))


def _facts(folder: Path) -> RunFacts:
    try:
        if os.path.isfile(folder / comparison.FILE):
            return _of_comparison(folder)
        if os.path.isfile(folder / STUDY_FILE):
            return _of_study(folder)
        return _of_record(folder) if os.path.isfile(folder / FILE) else _of_plan(folder)
    except (EvenstepError, OSError, ValueError) as error:
        return RunFacts(run=str(folder), state="unreadable", error=str(error), changed=folder.stat().st_mtime)


def _of_comparison(folder: Path) -> RunFacts:
    found = comparison.Comparison.read(folder)
    changed = (folder / comparison.FILE).stat().st_mtime
    return RunFacts(run=str(folder), state="compared", task=found.task, changed=changed)


def _of_study(folder: Path) -> RunFacts:
    path = folder / STUDY_FILE
    with path.open() as file:
        # A last line may be half written.
        request, *rows = [json.loads(line) for line in file if line.endswith("\n")]
    try:
        return RunFacts(
            run=str(folder),
            state="study",
            task=str(request.get("task")),
            trials=request.get("trials"),
            suggested=sum(row["kind"] == "suggestedtrial" for row in rows),
            best=_best_of_study(folder, str(request.get("metric")), rows),
            changed=path.stat().st_mtime,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a study") from error


def _best_of_study(folder: Path, metric: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The best of the trials that have come furthest; with the keys of a run's best checkpoint."""
    name, direction = parse_best(metric)
    reached = [row for row in rows if row["kind"] == "reached"]
    if not reached:
        return None
    furthest = max(row["rung"] for row in reached)
    values = {row["trial"]: row for row in reached if row["rung"] == furthest}
    sign = 1 if direction == "min" else -1
    first = min(values, key=lambda trial: (sign * values[trial]["value"], trial))
    checkpoint = folder / TRIALS / f"{first:04d}" / "checkpoints" / "best"
    best = {"metric": name, "value": values[first]["value"], "step": values[first].get("best_step")}
    return {**best, "checkpoint": str(checkpoint), "trial": first}


def _of_plan(folder: Path) -> RunFacts:
    """A folder without a Record: those of `compare --links` and `predict` have a folder for each measurement."""
    values = _of(read_plan(folder))
    found: list[tuple[RunState, Path]] = [
        ("compared", folder / comparison.LINKS_FILE),
        ("predicted", folder / prediction.FOLDER / prediction.FILE),
        ("stopped", folder / comparison.STOPPED),
    ]
    for state, file in found:
        if os.path.isfile(file):
            return RunFacts(run=str(folder), state=state, changed=file.stat().st_mtime, **values)
    error = _first_error(folder) or _lost_rank(folder)
    changed = (folder / "plan.json").stat().st_mtime
    return RunFacts(run=str(folder), state="failed" if error else "not started", error=error, changed=changed, **values)


def _of_record(folder: Path) -> RunFacts:
    path = folder / FILE
    start, rows = ends_of(path)
    last: dict[type, Any] = {}
    for row in rows:
        if isinstance(row, Start):
            # Resumed in this folder: what comes is the run's end.
            last.pop(Summary, None)
            last.pop(RunEnd, None)
        last[type(row)] = row
    step, evaluation, summary, end = last.get(Step), last.get(Evaluation), last.get(Summary), last.get(RunEnd)
    state, error = ("done", None) if summary else ("running", None) if is_written(path) else _end(folder, start, end)
    return RunFacts(
        run=str(folder),
        state=state,
        epoch=step.epoch + 1 if step else 0,
        step=step.step if step else 0,
        train_loss=summary.train_loss if summary else step.loss if step else None,
        valid=summary.valid if summary else evaluation.values if evaluation else {},
        best=vars(summary.best) if summary and summary.best else None,
        error=error,
        changed=path.stat().st_mtime,
        **_of(Plan.from_json(start.plan)),
    )


def _end(folder: Path, start: Start, end: RunEnd | None) -> tuple[RunState, str | None]:
    """How a run without a summary has ended, and its first error."""
    if end is not None and end.state == "stopped":
        return "stopped", None
    error = _first_error(folder) or (end.why if end is not None else None)
    if error is not None:
        return "failed", error
    # Nobody writes down how the process of a custom loop has ended.
    return "stopped" if start.plan.get("task") == CUSTOM_LOOP else "killed", None


def _of(plan: Plan) -> dict[str, Any]:
    names = ("task", "options", "strategy", "epochs", "steps")
    return {**{name: getattr(plan, name) for name in names}, "devices": list(plan.devices)}


def _first_error(folder: Path) -> str | None:
    """What the first rank that failed has reported in the last attempt; None if that only lost another rank."""
    reports = _last_reports(folder)
    if not reports:
        return None
    first = min(reports, key=lambda one: (one["is_victim"], int(one["nanoseconds"])))
    if first["is_victim"]:
        return None
    message = f"{first['type']}: {first['message']}".strip().rstrip(":")
    return (message.splitlines() or [""])[0]


def _lost_rank(folder: Path) -> str | None:
    return "a rank was killed before the first step" if _last_reports(folder) else None


def _last_reports(folder: Path) -> list[Mapping[str, Any]]:
    """Those of the last attempt that left any."""
    reports: dict[Path, list[Mapping[str, Any]]] = {}
    for path in folder.glob("logs/**/rank*.error.json"):
        reports.setdefault(path.parent, []).append(json.loads(path.read_text()))
    return max(reports.values(), key=lambda found: max(int(one["nanoseconds"]) for one in found), default=[])


def runs_table(runs: Sequence[RunFacts]) -> Table:
    """One line per run; its name comes last, since it may be long."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("state", "at", "result", "run"):
        table.add_column(name, no_wrap=True)
    for one in runs:
        state = Text(one.state, style=STYLES.get(one.state, ""))
        table.add_row(state, _position(one), plain(_result(one)), plain(one.run))
    return table


def _position(one: RunFacts) -> str:
    if one.state == "study" and one.trials is not None:
        return f"trial {one.suggested}/{one.trials}"
    if one.state in ("compared", "predicted", "study", "unreadable", "not started") or (
        one.state == "stopped" and not one.step
    ):
        return "-"
    if one.state == "done" or (one.steps is None and one.epochs is None):
        return f"step {one.step}"
    return f"step {one.step}/{one.steps}" if one.steps else f"epoch {one.epoch}/{one.epochs}"


def _result(one: RunFacts) -> str:
    result = f"train loss {number(one.train_loss)}" if one.train_loss is not None else "-"
    if one.state == "study" and one.best is not None:
        result = f"best {one.best['metric']} {number(one.best['value'])}"
    if one.valid:
        result = "valid " + ", ".join(f"{name} {number(value)}" for name, value in one.valid.items())
    result = result if one.error is None else one.error
    return result if len(result) <= MOST_RESULT else f"{result[: MOST_RESULT - 1].rstrip()}…"
