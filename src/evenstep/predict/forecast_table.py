"""What `predict` prints on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.predict.published import CheckResult, TableErrors
from evenstep.report.prediction import PART_NAMES, Forecast, Prediction
from evenstep.report.terminal import plain, print_table, table_of, without_control


def show_check(result: CheckResult, console: Console) -> None:
    """The errors on every publisher's tables, first; then what is suspect in them, and what is not reached."""
    table = table_of("tables", "rows", "median", "p90", "worst", "linear*", "skill**", "in interval")
    for one in result.publishers:
        _add_errors(table, one.name, one)
        for part in result.families:
            if part.name.startswith(f"{one.name}-"):
                _add_errors(table, f"  {part.name.removeprefix(f'{one.name}-')}", part)
    _add_errors(table, result.total.name, result.total)
    print_table(table, console)
    lines = [
        "",
        "* median error of n devices being n times as fast; ** 1 - mean error / that of linear scaling",
        "The tables of each publisher are predicted with constants and a 90 % interval that were chosen without them:",
        f"{result.constants.jitter:g} s of jitter in a step of 1 s with one core a rank, GPUs that differ by "
        f"{result.constants.deviation:.0%}, {result.constants.share:.0%} of a network's rate, of all tables.",
        "",
        *_bound(result),
        *(f"suspect, and not used: {line}" for line in result.suspects),
        *(f"not predicted, as --link is required: {line}" for line in result.refused),
        *(f"one kind of network: {line}" for line in result.weak),
        "",
        *(f"not met: {line}" for line in result.unmet),
    ]
    for line in lines if result.unmet else [*lines, "all targets are met"]:
        console.print(line, markup=False, soft_wrap=True)


def _add_errors(table: Table, name: str, one: TableErrors) -> None:
    table.add_row(
        name,
        str(one.points),
        f"{one.median:.1%}",
        f"{one.p90:.1%}",
        f"{one.worst:.1%}",
        f"{one.linear:.1%}",
        f"{one.skill:.2f}",
        f"{one.covered:.0%}",
    )


def _bound(result: CheckResult) -> list[str]:
    names = dict.fromkeys(f"{row.family}: {row.name}" for row in result.rows if row.is_input_bound)
    return [f"limited by input: {name}" for name in names]


def show_forecast(found: Forecast, console: Console) -> None:
    """What was measured, what is predicted, where it goes; the knee, and how wrong such forecasts were."""
    for table in (_rates(found), _step_table(found), _sending(found), _epochs(found)):
        if not table.row_count:
            continue
        print_table(table, console)
        console.print()
    about = "; ".join(words for name, words in MEANS.items() if name in _shown_parts(found))
    lines = [about, *(knee.sentence for knee in found.knees), found.links, found.errors, *found.notes]
    lines += [f"{name} is left out: {why}" for name, why in found.left_out.items()]
    for line in lines:
        console.print(without_control(line), markup=False, soft_wrap=True)


def _rates(found: Forecast) -> Table:
    batches = ["batch"] * (len({row.batch for row in found.rows}) > 1)
    table = table_of("strategy", "", "machines", *batches, "samples/s", "90 % interval", "efficiency")
    table.add_column("limit", no_wrap=True)
    for row in found.rows:
        rate = row.samples_per_second
        source = Text("measured", style="green") if row.is_measured else Text("predicted")
        batch = [f"{row.batch:,.0f}"] * len(batches)
        # Measured once, it has no range.
        interval = f"{_short(rate.low)}-{_short(rate.high)}" if rate.low < rate.high else ""
        cells = [f"{row.machines:,}", *batch, _short(rate.middle), interval, f"{row.efficiency:.0%}"]
        table.add_row(plain(row.label), source, *cells, PART_NAMES.get(row.limit, row.limit))
    return table


SHORT = {**PART_NAMES, "communication": "comm.*", "optimizer": "opt.", "unexplained": "unexpl.**"}
MEANS = {
    "communication": "* not overlapped with backward",
    "bubble": "bubble: a rank of a pipeline waits until others have computed",
    "handling": "memory: copying and summing gradients",
    "contention": "contention: what overlapped communication takes from backward",
    "stragglers": "slowest: waiting for the slowest rank",
    "waiting": "reading: waiting for what a machine cannot read faster",
    "unexplained": "** beyond the model, where it was measured",
}
"""Below the table, for the columns that it has."""


def _shown_parts(found: Forecast) -> list[str]:
    names = dict.fromkeys(name for row in found.rows for name in row.parts)
    # Most steps have none of these.
    rare = [
        name
        for name in ("handling", "contention", "waiting", "bubble", "unexplained")
        if not any(row.parts.get(name) for row in found.rows)
    ]
    return [name for name in names if name not in rare]


def _step_table(found: Forecast) -> Table:
    shown = _shown_parts(found)
    table = table_of("ms/step", "total", *(SHORT.get(name, name) for name in shown))
    for label, row in zip(found.labels, found.rows, strict=True):
        cells = [f"{row.parts.get(name, 0.0) * 1000:.2f}" for name in shown]
        table.add_row(plain(label), f"{row.step_seconds.middle * 1000:.2f}", *cells)
    return table


def _sending(found: Forecast) -> Table:
    """What is sent in each predicted step, and how much of it backward hides."""
    table = table_of("sending", "buckets", "ms", "hidden", "waited for")
    table.add_column("by", no_wrap=True)
    for label, row in zip(found.labels, found.rows, strict=True):
        if row.buckets:
            waited = row.parts.get("communication", 0.0)
            cells = [f"{1000 * seconds:.2f}" for seconds in (waited + row.hidden_seconds, row.hidden_seconds, waited)]
            table.add_row(plain(label), f"{row.buckets:,}", *cells, row.algorithm)
    return table


def _epochs(found: Forecast) -> Table:
    """What an epoch takes, part by part; and the whole job."""
    rows = [row for row in found.rows if row.device_hours is not None]
    names = [name for name in dict.fromkeys(name for row in rows for name in row.epoch_parts) if name != "steps"]
    names = [name for name in names if any(row.epoch_parts.get(name) for row in rows)]
    has_cost, epochs = any(row.cost is not None for row in rows), next((row.epochs for row in rows if row.epochs), None)
    job = [f"{epochs:g} epochs"] if epochs else []
    table = table_of("epoch", "takes", *names, "device hours", *["cost"] * has_cost, *job)
    for row in rows:
        parts = [_time(row.epoch_parts.get(name)) for name in names]
        cost = [f"{row.cost:.3g}" if row.cost is not None else ""] * has_cost
        whole = [_job(row, epochs)] if epochs else []
        table.add_row(plain(row.label), _time(row.epoch_seconds), *parts, f"{row.device_hours:.3g}", *cost, *whole)
    return table


def _job(row: Prediction, epochs: float) -> str:
    cost = f", {epochs * row.cost:.3g}" if row.cost is not None else ""
    return f"{_time(epochs * (row.epoch_seconds or 0.0))}, {epochs * (row.device_hours or 0.0):.3g} device h{cost}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds >= 3600:
        return f"{seconds / 3600:.2f} h"
    if 0 < seconds < 0.001:
        return "< 1 ms"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.3g} s"


def _short(rate: float) -> str:
    return f"{rate / 1e6:,.2f}M" if rate >= 1e6 else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
