"""What the page of a comparison, or of some runs, says; one HTML file that needs nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.errors import BadInput
from evenstep.record import FILE as RECORD_FILE
from evenstep.record import Record, Timeline
from evenstep.report import sheets
from evenstep.report.comparison import Comparison, Row
from evenstep.report.render import Page, need_bokeh, render
from evenstep.report.sheets import Sheet, distinct
from evenstep.report.words import OF_COMPARISONS

if TYPE_CHECKING:
    from evenstep.report.look import Chart

FILE = "page.html"


def write_page(comparison: Comparison, folder: Path, path: Path | None = None) -> Path:
    """Write the page of a comparison whose runs lie in `folder`, there or at `path`; where it was written."""
    target = path or folder / FILE
    _write(target, page_of_comparison(comparison, folder))
    return target


def write_page_of_runs(records: Sequence[Record], path: Path) -> Path:
    """Write the page of these runs."""
    _write(path, page_of_runs(records))
    return path


def _write(path: Path, text: str) -> None:
    try:
        # surrogatepass would not survive a browser: a name that is no Unicode is shown with question marks.
        path.write_bytes(text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror}); give another place with --out") from error


def page_of_comparison(comparison: Comparison, folder: Path) -> str:
    """The page of a comparison whose runs lie in `folder`."""
    need_bokeh()
    names = distinct([row.label for row in comparison.rows])
    found = {name: _records(row, folder) for name, row in zip(names, comparison.rows, strict=True)}
    plans = {name: records[0].plan for name, records in found.items() if records}
    times = {name: _step_seconds(records) for name, records in found.items()}
    missing = [name for name, records in found.items() if not records]
    return render(
        Page(
            title=comparison.task,
            about=_about(comparison),
            commands=[comparison.command] if comparison.command else [],
            charts=_comparison_charts(comparison, found) if comparison.rows else [],
            comparison=comparison,
            compared=sheets.compared_rows(comparison),
            numbers={"parts": sheets.parts_sheet(comparison), "times": sheets.times_sheet(times)},
            sheets=[
                *sheets.plan_sheets(list(plans), list(plans.values())),
                sheets.machine_sheet(comparison.machine),
            ],
            words=OF_COMPARISONS,
            notes=[*_larger_batch(comparison), *_missing(missing)],
        )
    )


def _comparison_charts(comparison: Comparison, found: Mapping[str, Sequence[Record]]) -> list[Chart]:
    from evenstep.report import bars, charts, look

    places = look.places([row.strategy for row in comparison.rows])
    losses = [
        charts.Drawn(label=name, place=place, record=records[0])
        for place, (name, records) in zip(places, found.items(), strict=True)
        if records
    ]
    memory = {name: row.peak_bytes for name, row in zip(found, comparison.rows, strict=True)}
    times = {name: _step_seconds(records) for name, records in found.items()}
    drawn = [
        *charts.scaling_charts(comparison),
        bars.parts_chart(comparison),
        *bars.timeline_charts(_timelines(found)),
        charts.loss_chart(losses),
        bars.memory_chart(memory, places),
        bars.times_chart(times, places),
    ]
    return [chart for chart in drawn if chart is not None]


def _larger_batch(comparison: Comparison) -> list[str]:
    larger = comparison.larger_batch
    if larger is None:
        return []
    return [
        f"With a batch {larger.times} times as large, {larger.label} does {larger.samples_per_second:,.0f} samples/s. "
        "What is learned changes with the batch, so that is no row of the table."
    ]


def _missing(names: Sequence[str]) -> list[str]:
    return [f"The Records of {', '.join(names)} are not here: no losses and no timeline."] if names else []


def _about(comparison: Comparison) -> str:
    facts = [
        f"batch {comparison.batch:,}",
        comparison.precision,
        f"{comparison.rounds} round{'s' * (comparison.rounds != 1)} of {comparison.steps} steps each",
        comparison.created.replace("T", " "),
    ]
    return " · ".join(fact for fact in facts if fact)


def _records(row: Row, folder: Path) -> list[Record]:
    """Those of a row's runs that are there; a page can be made when only the numbers were kept."""
    inside = [folder / run for run in row.runs if (folder / run).resolve().is_relative_to(folder.resolve())]
    return [Record.read(run) for run in inside if (run / RECORD_FILE).is_file()]


def _step_seconds(records: Sequence[Record]) -> list[float]:
    """Of every measured step; of a run that was not measured, of all steps but the first, which starts things up."""
    return [
        seconds
        for record in records
        for seconds in (
            record.measurement.step_seconds if record.measurement else [step.seconds for step in record.steps[1:]]
        )
    ]


def _timelines(found: Mapping[str, Sequence[Record]]) -> dict[str, Timeline]:
    from evenstep.report.bars import typical

    chosen = {name: typical([one for record in records for one in record.timelines]) for name, records in found.items()}
    return {name: one for name, one in chosen.items() if one is not None}


def page_of_runs(records: Sequence[Record]) -> str:
    """The page of one run or several."""
    return render(runs_page(records))


def runs_page(records: Sequence[Record]) -> Page:
    """What the page of these runs says."""
    need_bokeh()
    names = distinct([record.plan.name for record in records])
    by_name = dict(zip(names, records, strict=True))
    times = {name: _step_seconds([record]) for name, record in by_name.items()}
    tasks = list(dict.fromkeys(record.plan.task for record in records))
    return Page(
        title=", ".join(tasks[:3]) + (" …" if len(tasks) > 3 else ""),
        about=names[0] if len(names) == 1 else f"{len(names)} runs",
        commands=[
            f"evenstep train --plan {shlex.quote(str(record.path.parent / 'plan.json'))}"
            for record in records
            if record.path
        ],
        charts=_runs_charts(by_name),
        runs=sheets.runs_sheet(names, records),
        numbers={"loss": sheets.evaluations_sheet(names, records), "times": sheets.times_sheet(times)},
        sheets=[*sheets.plan_sheets(names, [record.plan for record in records]), *_machines(by_name)],
    )


def _runs_charts(records: Mapping[str, Record]) -> list[Chart]:
    from evenstep.report import bars, charts

    places = range(len(records))
    runs = [
        charts.Drawn(label=name, place=place, record=record)
        for place, (name, record) in zip(places, records.items(), strict=True)
    ]
    drawn = [
        charts.loss_chart(runs),
        *bars.timeline_charts(_timelines({name: [record] for name, record in records.items()})),
        *charts.metric_charts(runs),
        charts.speed_chart(runs),
        charts.input_chart(runs),
        bars.memory_chart({name: sheets.peaks(record) for name, record in records.items()}, places),
        bars.times_chart({name: _step_seconds([record]) for name, record in records.items()}, places),
    ]
    return [chart for chart in drawn if chart is not None]


def _machines(records: Mapping[str, Record]) -> list[Sheet]:
    """Each machine once, and who ran on it if there are several."""
    groups: dict[str, list[str]] = {}
    for name, record in records.items():
        groups.setdefault(json.dumps(record.machine, sort_keys=True, default=str), []).append(name)
    title = "Machine and versions"
    return [
        sheets.machine_sheet(records[names[0]].machine, title if len(groups) == 1 else f"{title}: {', '.join(names)}")
        for names in groups.values()
    ]
