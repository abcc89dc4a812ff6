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
from evenstep.report.curves import ReadRun
from evenstep.report.render import Page, need_bokeh, render
from evenstep.report.sheets import Sheet, distinct
from evenstep.report.thin import Sampled
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
    found = {name: _read(row, folder) for name, row in zip(names, comparison.rows, strict=True)}
    plans = {name: runs[0].record.plan for name, runs in found.items() if runs}
    times = {name: _step_seconds(runs) for name, runs in found.items()}
    missing = [name for name, runs in found.items() if not runs]
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


def _comparison_charts(comparison: Comparison, found: Mapping[str, Sequence[ReadRun]]) -> list[Chart]:
    from evenstep.report import bars, charts, look

    places = look.places([row.strategy for row in comparison.rows])
    losses = [
        charts.Drawn(label=name, place=place, run=runs[0])
        for place, (name, runs) in zip(places, found.items(), strict=True)
        if runs
    ]
    memory = {name: row.peak_bytes for name, row in zip(found, comparison.rows, strict=True)}
    times = {name: _step_seconds(runs) for name, runs in found.items()}
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


def _read(row: Row, folder: Path) -> list[ReadRun]:
    """Those of a row's runs that are there; a page can be made when only the numbers were kept."""
    inside = [folder / run for run in row.runs if (folder / run).resolve().is_relative_to(folder.resolve())]
    return [ReadRun.of(Record.read(run)) for run in inside if (run / RECORD_FILE).is_file()]


def _step_seconds(runs: Sequence[ReadRun]) -> Sampled:
    return runs[0].step_seconds if len(runs) == 1 else Sampled.merged([run.step_seconds for run in runs])


def _timelines(found: Mapping[str, Sequence[ReadRun]]) -> dict[str, Timeline]:
    from evenstep.report.bars import typical

    chosen = {name: typical([one for run in runs for one in run.record.timelines]) for name, runs in found.items()}
    return {name: one for name, one in chosen.items() if one is not None}


def page_of_runs(records: Sequence[Record]) -> str:
    """The page of one run or several."""
    return render(runs_page([ReadRun.of(record) for record in records]))


def runs_page(runs: Sequence[ReadRun]) -> Page:
    """What the page of these runs says."""
    need_bokeh()
    records = [run.record for run in runs]
    names = distinct([record.plan.name for record in records])
    by_name = dict(zip(names, runs, strict=True))
    times = {name: run.step_seconds for name, run in by_name.items()}
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
        runs=sheets.runs_sheet(names, runs),
        numbers={"loss": sheets.evaluations_sheet(names, records), "times": sheets.times_sheet(times)},
        sheets=[*sheets.plan_sheets(names, [record.plan for record in records]), *_machines(names, records)],
    )


def _runs_charts(runs: Mapping[str, ReadRun]) -> list[Chart]:
    from evenstep.report import bars, charts

    places = range(len(runs))
    drawn_runs = [
        charts.Drawn(label=name, place=place, run=run) for place, (name, run) in zip(places, runs.items(), strict=True)
    ]
    drawn = [
        charts.loss_chart(drawn_runs),
        *bars.timeline_charts(_timelines({name: [run] for name, run in runs.items()})),
        *charts.metric_charts(drawn_runs),
        charts.speed_chart(drawn_runs),
        charts.input_chart(drawn_runs),
        bars.memory_chart({name: run.peak_bytes for name, run in runs.items()}, places),
        bars.times_chart({name: run.step_seconds for name, run in runs.items()}, places),
    ]
    return [chart for chart in drawn if chart is not None]


def _machines(names: Sequence[str], records: Sequence[Record]) -> list[Sheet]:
    """Each machine once, and who ran on it if there are several."""
    machines = {name: record.machine for name, record in zip(names, records, strict=True)}
    groups: dict[str, list[str]] = {}
    for name, machine in machines.items():
        groups.setdefault(json.dumps(machine, sort_keys=True, default=str), []).append(name)
    title = "Machine and versions"
    return [
        sheets.machine_sheet(machines[group[0]], title if len(groups) == 1 else f"{title}: {', '.join(group)}")
        for group in groups.values()
    ]
