"""The tables of a page: every number that its charts show; and the glossary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from typing import Any

from evenstep.plan import Plan
from evenstep.record import Record, parts_shown
from evenstep.report.comparison import Comparison, Range
from evenstep.report.html.curves import Quantiles, ReadRun, Sampled
from evenstep.report.prediction import PART_NAMES, Prediction
from evenstep.report.terminal import devices, number, size, without_control


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table of words; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    links: Sequence[str] = ()
    """Where the name of each row leads; empty for those that lead nowhere."""


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that come again."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name} ({number})" for number in count(2))
        found.append(next(one for one in chain([name], numbered) if one not in found))
    return found


def milliseconds(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    ms = seconds * 1000
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 0.1 else f"{ms:.3f}"


def with_range(seconds: Range | None) -> str:
    """In milliseconds: `5.93 (5.80 to 6.02)`."""
    if seconds is None:
        return "-"
    middle, low, high = (f"{value * 1000:,.2f}" for value in (seconds.middle, seconds.low, seconds.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def amount(num_bytes: int) -> str:
    """Bytes, down to single ones: what is sent is often small."""
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 1024:,.1f} KiB" if num_bytes >= 1024 else f"{num_bytes} B"


def parts_sheet(comparison: Comparison) -> Sheet:
    """The parts of each row's step in milliseconds, and the two ceilings."""
    shown = parts_shown([row.parts for row in comparison.rows])
    rows = [
        [
            name,
            *(milliseconds(row.parts.get(part, 0.0)) for part in shown),
            milliseconds(sum(row.parts.values())),
            milliseconds(row.step_seconds.middle),
            with_range(row.without_input_seconds),
            with_range(row.without_communication_seconds),
        ]
        for row, name in zip(comparison.rows, distinct([row.label for row in comparison.rows]), strict=True)
    ]
    columns = ["", *shown, "sum of parts", "step", "without input", "without communication"]
    return Sheet(title="Parts of a step, in ms", columns=columns, rows=rows)


def runs_sheet(names: Sequence[str], runs: Sequence[ReadRun]) -> Sheet:
    """One line per run: losses and metrics, speed, and peak memory."""
    metrics = _metrics([run.record for run in runs])
    columns = ["", "task", "strategy", "devices", "batch", "steps", "loss"]
    columns += [f"valid {without_control(name)}" for name in metrics] + ["samples/s", "peak memory", "state"]
    return Sheet(title="Runs", columns=columns, rows=[_run(*pair, metrics) for pair in zip(names, runs, strict=True)])


def _run(name: str, run: ReadRun, metrics: Sequence[str]) -> list[str]:
    record, last = run.record, run.curves.last
    plan, values = record.plan, record.evaluations[-1].values if record.evaluations else {}
    return [
        name,
        plan.task_name,
        plan.strategy,
        devices(plan.devices),
        f"{plan.batch:,}",
        f"{last.step:,}" if last is not None else "0",
        _loss(run),
        *(number(values.get(metric)) for metric in metrics),
        f"{_speed(run):,.0f}",
        ", ".join(size(num_bytes) for num_bytes in run.peak_bytes.values()) or "-",
        _state(record),
    ]


def _state(record: Record) -> str:
    if record.summary is None:
        return "not ended"
    best = record.summary.best
    shown = (
        f"; best {without_control(best.metric)} {number(best.value)} at step {best.step:,}" if best is not None else ""
    )
    return f"{'stopped early' if record.summary.stopped else 'ended'}{shown}"


def _loss(run: ReadRun) -> str:
    """Of the last epoch where the run has ended, of the last step otherwise; and how many were no numbers."""
    loss = run.record.summary.train_loss if run.record.summary is not None else None
    if loss is None and run.curves.last is not None:
        loss = run.curves.last.loss
    num_bad = run.curves.num_not_finite
    return f"{number(loss)} ({num_bad} not finite)" if num_bad else number(loss)


def _speed(run: ReadRun) -> float:
    if run.record.summary is not None:
        return run.record.summary.samples_per_second
    seconds = run.curves.total_seconds
    return run.curves.samples / seconds if seconds else 0.0


def times_sheet(rows: Mapping[str, Sampled]) -> Sheet:
    found = {name: Quantiles.of(sampled) for name, sampled in rows.items()}
    lines = [
        [name, f"{cuts.count:,}", *map(milliseconds, (cuts.least, cuts.p5, cuts.middle, cuts.p95, cuts.most))]
        for name, cuts in found.items()
        if cuts is not None
    ]
    columns = ["", "steps", "fastest", "p5", "median", "p95", "slowest"]
    return Sheet(title="Step times, in ms", columns=columns, rows=lines)


def evaluations_sheet(names: Sequence[str], records: Sequence[Record], most: int = 20) -> Sheet:
    metrics = _metrics(records)
    rows = [
        [name, f"{one.epoch + 1}", f"{one.step:,}", *(number(one.values.get(metric)) for metric in metrics)]
        for name, record in zip(names, records, strict=True)
        for one in record.evaluations[-most:]
    ]
    return Sheet(title="Evaluations", columns=["", "epoch", "step", *map(without_control, metrics)], rows=rows)


def _metrics(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for one in record.evaluations for name in one.values))


def plan_sheets(names: Sequence[str], plans: Sequence[Plan]) -> list[Sheet]:
    """What all plans have in common, and where they differ; what is off or none everywhere is not shown."""
    values = [{**asdict(plan), "devices": ", ".join(plan.devices), "options": plan.options_in_words} for plan in plans]
    shown = [field for field in (values[0] if values else {}) if any(_is_set(one[field]) for one in values)]
    same = [field for field in shown if len({str(one[field]) for one in values}) == 1]
    other = [field for field in shown if field not in same]
    title = "Plan, common to all" if len(plans) > 1 else "Plan"
    sheets = [Sheet(title=title, columns=[], rows=_pairs(values[0], same))] if same else []
    if other:
        rows = [[_words(field), *(_value(one[field]) for one in values)] for field in other]
        sheets.append(Sheet(title="Plan, differences", columns=["", *names], rows=rows))
    return sheets


def machine_sheet(machine: Mapping[str, Any], title: str = "Machine and versions") -> Sheet:
    """What the numbers were measured on."""
    values = dict(machine)
    if isinstance(values.get("memory_bytes"), int):
        values["memory"] = size(values.pop("memory_bytes"))
    return Sheet(title=title, columns=[], rows=_pairs(values, [name for name in values if _is_set(values[name])]))


def _pairs(values: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    return [[_words(name), _value(values[name])] for name in names]


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != [] and value != ""


def _words(name: str) -> str:
    return without_control(str(name)).replace("_", " ")


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    if isinstance(value, dict):
        return ", ".join(f"{_words(name)} {_value(one)}" for name, one in value.items())
    if value is None or isinstance(value, bool):
        return "-" if value is None else "yes" if value else "no"
    return without_control(str(value))


OF_RUNS = {
    "loss": "mean over the global batch of each step; in the table, over the last epoch of a run that has ended",
    "samples/s": "samples of a step divided by its seconds, without evaluation, checkpoints and start-up",
    "wait for input": "the part of a step spent waiting for its batch",
    "peak memory": "the most memory that a device used; on a CPU, that of the whole process, torch included",
}

OF_COMPARISONS = {
    "samples/s": "median of all rounds; below it, the slowest and the fastest round",
    "speed-up": "samples/s divided by those of the first row",
    "efficiency": "speed-up divided by the number of devices: 100 % is ideal scaling",
    "input": "waiting for the batch of the step",
    "forward, backward": "computing the loss and its gradients on the device; like all parts, the mean over ranks",
    "communication": "sending gradients (under some strategies, parameters) without overlap with backward",
    "bubble": "in a pipeline: waiting until other ranks have computed; communication is until what they sent is there",
    "optimizer": "updating the weights",
    "without input": "the same step with its batch already loaded: the limit of what faster input could gain",
    "without communication": "the same step without communication: the limit of what faster links could gain",
    "peak memory": OF_RUNS["peak memory"],
    "sent a step": "bytes that each rank sends in a step",
    "start-up": "from the start of the processes to the end of the first step",
    "vs. single": "do losses and weights match those of one device, within rounding? If not, it is not recommended",
}


OF_PREDICTIONS = {
    "90 % interval": "for what is predicted: 9 of 10 past predictions were so near; for what was measured, its range",
    "efficiency": "samples/s for each device, divided by those of one device: 100 % is ideal scaling",
    "limit": "what costs most against n devices that are n times as fast",
    "communication": OF_COMPARISONS["communication"],
    "bubble": "in which a rank of a pipeline waits until others have computed",
    "memory": "copying gradients into buckets and back, and summing them, in the memory of a GPU",
    "contention": "what communication that overlaps with backward takes from it",
    "slowest": "waiting for the slowest rank",
    "reading": "waiting for what a machine cannot read any faster",
    "unexplained": "what a measured step took beyond the model",
}


def predicted_sheet(rows: Sequence[Prediction]) -> Sheet:
    columns = ["", "", "machines", "batch", "samples/s", "90 % interval", "efficiency", "limit"]
    return Sheet(
        title="Measured and predicted",
        columns=columns,
        rows=[
            [
                row.label,
                "measured" if row.is_measured else "predicted",
                f"{row.machines:,}",
                f"{row.batch:,.0f}",
                f"{row.samples_per_second.middle:,.0f}",
                _interval(row.samples_per_second),
                f"{row.efficiency:.0%}",
                PART_NAMES.get(row.limit, row.limit),
            ]
            for row in rows
        ],
    )


def _interval(rate: Range) -> str:
    """Nothing where it was measured once."""
    return f"{rate.low:,.0f} to {rate.high:,.0f}" if rate.low < rate.high else ""
