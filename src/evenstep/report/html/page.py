"""The page of a comparison or of runs: one self-contained HTML file.

It needs no network, runs no JavaScript but bokeh's and our own, and escapes everything.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import evenstep
from evenstep.errors import BadInput
from evenstep.plan import CUSTOM_LOOP
from evenstep.record import FILE as RECORD_FILE
from evenstep.record import PARTS, Record, Timeline, parts_shown, study_of
from evenstep.report.comparison import Comparison, Row
from evenstep.report.html import tables
from evenstep.report.html.curves import ReadRun, Sampled
from evenstep.report.html.tables import OF_COMPARISONS, OF_RUNS, Sheet, distinct
from evenstep.report.prediction import Forecast
from evenstep.report.terminal import devices, size, without_control

if TYPE_CHECKING:
    from jinja2 import Environment

    from evenstep.report.html.charts import Chart

HERE = Path(__file__).parent
NEEDS_BOKEH = "a page needs bokeh, which is not installed; pip install 'evenstep[page]'"


@dataclass(frozen=True, kw_only=True)
class PageLink:
    """To another page, relative to this one."""

    text: str
    to: str


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    about: str
    commands: Sequence[str]
    charts: Sequence[Chart]
    comparison: Comparison | None = None
    runs: Sheet | None = None
    numbers: Mapping[str, Sheet] = field(default_factory=dict)
    """Sheets that hold the numbers of a chart, by its name."""
    sheets: Sequence[Sheet] = ()
    sheets_title: str = "Configuration"
    notes: Sequence[str] = ()
    links: Sequence[PageLink] = ()
    words: Mapping[str, str] = field(default_factory=lambda: OF_RUNS)
    status: str = ""
    shape: str = ""
    """Of a live page: which charts, lines and tables it has. When that changes, the page is loaded again."""

    @property
    def timelines(self) -> list[Chart]:
        """The charts of which tabs show one at a time."""
        return [chart for chart in self.charts if chart.tab]


def need_bokeh() -> None:
    """Say what to install where it is missing."""
    if find_spec("bokeh") is None:
        raise BadInput(NEEDS_BOKEH)


def render(page: Page) -> str:
    """The page as text; its policy allows the two scripts in it, by their hashes, and nothing else."""
    scripts = [bokeh_script(), _own("page.js")]
    sources = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    connect = "connect-src 'self'; " if page.shape else ""
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; {connect}"
        "base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            parts=parts_shown([row.parts for row in page.comparison.rows]) if page.comparison else PARTS,
            policy=policy,
            style=_own("page.css"),
            scripts=scripts,
            items=_data({chart.name: item(chart) for chart in page.charts}),
            version=evenstep.__version__,
        )
    )


def item(chart: Chart) -> dict[str, Any]:
    """A chart as bokeh's own JSON, in the words that its `embed_item` reads; made without its many checks."""
    import bokeh
    from bokeh.document import Document

    document = Document()
    document.add_root(chart.figure)
    found = {"root_id": chart.figure.id, "doc": document.to_json(deferred=False), "version": bokeh.__version__}
    # A figure that still belongs to a document could not be written a second time.
    document.clear()
    return found


def _data(value: object) -> str:
    """JSON that may stand in a script element: nothing in it can end that element."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def bokeh_script() -> str:
    """BokehJS as the installed package has it, without widgets, tables, WebGL and TeX."""
    from bokeh.util.paths import bokehjs_path

    text = (Path(bokehjs_path()) / "js" / "bokeh.min.js").read_text(encoding="utf-8")
    # A browser reads line ends as \n, and the hash is of what it reads.
    return text.replace("\r\n", "\n")


@cache
def _own(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode()


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Control bytes do not belong on a page, whoever wrote them into a name.
        finalize=lambda value: without_control(value) if type(value) is str else value,
    )
    made.filters |= {"ms": tables.milliseconds, "amount": tables.amount, "size": size, "devices": devices}
    made.filters["distinct"] = distinct
    return made


FILE = "page.html"


def write_page(comparison: Comparison, folder: Path, path: Path | None = None) -> Path:
    """Write the page of a comparison whose runs lie in `folder`, there or at `path`; returns where."""
    target = path or folder / FILE
    write_text(target, page_of_comparison(comparison, folder))
    return target


def write_page_of_runs(records: Sequence[Record], path: Path, links: Sequence[PageLink] = ()) -> Path:
    """Write the page of runs; its links are to pages that lie beside it."""
    write_text(path, page_of_runs(records, links))
    return path


def write_text(path: Path, text: str) -> None:
    try:
        # surrogatepass would not survive a browser: a name that is no Unicode is shown with question marks.
        path.write_bytes(text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror}); give another path with --out") from error


def page_of_comparison(comparison: Comparison, folder: Path) -> str:
    need_bokeh()
    names = distinct([row.label for row in comparison.rows])
    found = {name: _read(row, folder) for name, row in zip(names, comparison.rows, strict=True)}
    plans = {name: runs[0].record.plan for name, runs in found.items() if runs}
    times = {name: _step_seconds(runs) for name, runs in found.items()}
    without = ", ".join(name for name, runs in found.items() if not runs)
    missing = [f"The Records of {without} are missing: no losses and no timeline."] if without else []
    predicted = Forecast.beside(folder)
    return render(
        Page(
            title=comparison.task,
            about=_about(comparison),
            commands=[comparison.command] if comparison.command else [],
            charts=_comparison_charts(comparison, found, predicted) if comparison.rows else [],
            comparison=comparison,
            numbers={
                "parts": tables.parts_sheet(comparison),
                "times": tables.times_sheet(times),
                **({"predicted-efficiency": tables.predicted_sheet(predicted.rows)} if predicted else {}),
            },
            sheets=[
                *tables.plan_sheets(list(plans), list(plans.values())),
                tables.machine_sheet(comparison.machine),
            ],
            words=OF_COMPARISONS,
            notes=[*_larger_batch(comparison), *missing, *([predicted.errors] if predicted else [])],
        )
    )


def _comparison_charts(
    comparison: Comparison, found: Mapping[str, Sequence[ReadRun]], predicted: Forecast | None
) -> list[Chart]:
    from evenstep.report.html import charts

    indices = charts.colour_indices([row.series for row in comparison.rows])
    losses = [
        charts.Drawn(label=name, index=index, run=runs[0])
        for index, (name, runs) in zip(indices, found.items(), strict=True)
        if runs
    ]
    memory = {name: row.peak_bytes for name, row in zip(found, comparison.rows, strict=True)}
    times = {name: _step_seconds(runs) for name, runs in found.items()}
    drawn = [
        *charts.scaling_charts(comparison),
        *_predicted_charts(predicted, [row.series for row in comparison.rows]),
        charts.parts_chart(comparison),
        *charts.timeline_charts(_timelines(found)),
        charts.loss_chart(losses),
        charts.memory_chart(memory, indices),
        charts.times_chart(times, indices),
    ]
    return [chart for chart in drawn if chart is not None]


def _predicted_charts(predicted: Forecast | None, strategies: Sequence[str]) -> list[Chart]:
    """Of `evenstep predict`, where that was given this comparison; in the colours that it gives its strategies."""
    if predicted is None or not predicted.rows:
        return []
    from evenstep.report.html.forecast_charts import curves_of

    return curves_of(predicted, strategies)


def _larger_batch(comparison: Comparison) -> list[str]:
    larger = comparison.larger_batch
    if larger is None:
        return []
    return [
        f"With a batch {larger.times} times as large, {larger.label} gives {larger.samples_per_second:,.0f} samples/s. "
        "A larger batch changes the training, so it is not a row of the table."
    ]


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
    from evenstep.report.html.charts import typical

    chosen = {name: typical([one for run in runs for one in run.record.timelines]) for name, runs in found.items()}
    return {name: one for name, one in chosen.items() if one is not None}


def page_of_runs(records: Sequence[Record], links: Sequence[PageLink] = ()) -> str:
    return render(replace(runs_page([ReadRun.of(record) for record in records]), links=links))


def runs_page(runs: Sequence[ReadRun]) -> Page:
    need_bokeh()
    records = [run.record for run in runs]
    names = distinct([record.plan.name for record in records])
    by_name = dict(zip(names, runs, strict=True))
    times = {name: run.step_seconds for name, run in by_name.items()}
    tasks = list(dict.fromkeys(record.plan.task_name for record in records))
    return Page(
        title=", ".join(tasks[:3]) + (" …" if len(tasks) > 3 else ""),
        about=_about_run(names[0], records[0]) if len(names) == 1 else f"{len(names)} runs",
        commands=[
            f"evenstep train --plan {shlex.quote(str(record.path.parent / 'plan.json'))}"
            for record in records
            if record.path and record.plan.task != CUSTOM_LOOP
        ],
        charts=_runs_charts(by_name),
        runs=tables.runs_sheet(names, runs),
        numbers={"loss": tables.evaluations_sheet(names, records), "times": tables.times_sheet(times)},
        sheets=[*tables.plan_sheets(names, [record.plan for record in records]), *_machines(names, records)],
    )


def _about_run(name: str, record: Record) -> str:
    """The name of a run; of a trial, which has a number for a name, its study and its options too."""
    study = study_of(record.path.parent) if record.path else None
    if study is None:
        return name
    return " · ".join(filter(None, [f"trial {name} of {study.name}", record.plan.options_in_words]))


def _runs_charts(runs: Mapping[str, ReadRun]) -> list[Chart]:
    from evenstep.report.html import charts

    indices = range(len(runs))
    drawn_runs = [
        charts.Drawn(label=name, index=index, run=run) for index, (name, run) in zip(indices, runs.items(), strict=True)
    ]
    drawn = [
        charts.loss_chart(drawn_runs),
        *charts.timeline_charts(_timelines({name: [run] for name, run in runs.items()})),
        *charts.metric_charts(drawn_runs),
        *charts.logged_charts(drawn_runs),
        charts.grad_norm_chart(drawn_runs),
        *charts.layer_charts(drawn_runs),
        charts.speed_chart(drawn_runs),
        charts.lr_chart(drawn_runs),
        charts.input_chart(drawn_runs),
        charts.memory_chart({name: run.peak_bytes for name, run in runs.items()}, indices),
        charts.times_chart({name: run.step_seconds for name, run in runs.items()}, indices),
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
        tables.machine_sheet(machines[group[0]], title if len(groups) == 1 else f"{title}: {', '.join(group)}")
        for group in groups.values()
    ]
