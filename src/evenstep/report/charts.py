"""Curves: speed-up and efficiency against ideal, losses on top of each other, whatever goes on from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bokeh.models import BasicTicker, ColumnDataSource, FixedTicker, NumeralTickFormatter
from bokeh.models.annotations import TeeHead, Whisker
from bokeh.models.glyphs import Line, Scatter
from bokeh.plotting import figure

from evenstep.record import Evaluation
from evenstep.report.comparison import Comparison, Row
from evenstep.report.curves import Curves, ReadRun
from evenstep.report.look import OTHER, Chart, Key, blank, colour, dash, draw, from_zero, label
from evenstep.report.thin import Thinned

FEW_POINTS = 2
"""So few that a line alone would hardly be seen, or not at all."""
Scale = Callable[[Row, float], float]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A run under the name and at the place (its colour) that it has on the page."""

    label: str
    place: int
    run: ReadRun

    @property
    def evaluations(self) -> list[Evaluation]:
        """Of its validation set."""
        return self.run.record.evaluations


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart, and whose it is."""

    name: str
    label: str
    place: int
    x: Sequence[float]
    y: Sequence[float]
    is_line: bool = True
    has_markers: bool = False


def loss_chart(runs: Sequence[Drawn]) -> Chart | None:
    """The loss of every step, and diamonds where the validation set was gone through."""
    lines = _of_steps(runs, lambda curves: curves.loss) + _of_evaluations(runs, "loss", is_line=False)
    caption = "Lines that lie on top of each other learned the same: the first is drawn widest, the others inside it."
    plot = _lines(lines, y="loss", tip="0.00000", is_nested=True)
    if plot is None:
        return None
    diamonds = " Diamonds: the validation set." if any(run.evaluations for run in runs) else ""
    words = (caption if len(runs) > 1 else "The mean over the batch of each step.") + diamonds
    return Chart(name="loss", title="Loss", figure=plot, keys=_keys(runs), caption=words, is_wide=True)


def metric_charts(runs: Sequence[Drawn], most: int = 6) -> list[Chart]:
    """One chart for each of the first metrics of the evaluations, the loss left out."""
    found = (name for run in runs for one in run.evaluations for name in one.values if name != "loss")
    charts = []
    for number, name in enumerate(list(dict.fromkeys(found))[:most]):
        plot = _lines(_of_evaluations(runs, name, is_line=True), y=label(name), tip="0.0000", is_nested=True)
        if plot is not None:
            charts.append(Chart(name=f"metric-{number}", title=f"Valid {name}", figure=plot, keys=_keys(runs)))
    return charts


def speed_chart(runs: Sequence[Drawn]) -> Chart | None:
    """Samples a second, step by step."""
    plot = _lines(_of_steps(runs, lambda curves: curves.samples_per_second), y="samples/s", tip="0,0")
    caption = "Of every step; where there are many, the slowest and the fastest of each stretch."
    return Chart(name="speed", title="Speed", figure=plot, keys=_keys(runs), caption=caption) if plot else None


def input_chart(runs: Sequence[Drawn]) -> Chart | None:
    """What of each step was spent waiting for its batch."""
    plot = _lines(_of_steps(runs, lambda curves: curves.input_ms), y="ms", tip="0.000")
    caption = "How long each step waited for its batch."
    return Chart(name="input", title="Wait for input", figure=plot, keys=_keys(runs), caption=caption) if plot else None


def _keys(runs: Sequence[Drawn]) -> list[Key]:
    return [
        Key(name=f"run {number}", label=run.label, colour=colour(run.place), dash=dash(run.place))
        for number, run in enumerate(runs)
    ]


def _of_steps(runs: Sequence[Drawn], chosen: Callable[[Curves], Thinned]) -> list[Series]:
    return [_series(number, run, chosen(run.run.curves), run.label) for number, run in enumerate(runs)]


def _of_evaluations(runs: Sequence[Drawn], metric: str, is_line: bool) -> list[Series]:
    found = []
    for number, run in enumerate(runs):
        points = ((one.step, one.values[metric]) for one in run.evaluations if metric in one.values)
        series = _series(number, run, Thinned.of(points), f"{run.label}, valid")
        found.append(replace(series, is_line=is_line, has_markers=True))
    return found


def _series(number: int, run: Drawn, thinned: Thinned, name: str) -> Series:
    points = thinned.points()
    x, y = [x for x, _ in points], [y for _, y in points]
    return Series(name=f"run {number}", label=name, place=run.place, x=x, y=y)


def _lines(all_series: Sequence[Series], *, y: str, tip: str, is_nested: bool = False) -> figure | None:
    """All of them in one figure; None where there is nothing to draw."""
    if not any(series.x for series in all_series):
        return None
    plot = blank(height=300, x="step", y=y, tips=[("", "@label"), ("step", "@x{0,0}"), (y, f"@y{{{tip}}}")])
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.xaxis.ticker = BasicTicker(min_interval=1)
    if any(abs(value) >= 10_000 for series in all_series for value in series.y):
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]a")
    names = list(dict.fromkeys(series.name for series in all_series))
    for series in all_series:
        columns = {"x": list(series.x), "y": list(series.y), "label": [label(series.label, 60)] * len(series.x)}
        source = ColumnDataSource(columns, name=f"{series.name} {'line' if series.is_line else 'marks'}")
        _draw(plot, series, source, _width(names.index(series.name), len(names)) if is_nested else 1.8)
    return plot


def _draw(plot: figure, series: Series, source: ColumnDataSource, width: float) -> None:
    ink, name = colour(series.place), series.name
    if series.is_line:
        draw(plot, source, Line(x="x", y="y", line_color=ink, line_width=width, line_dash=dash(series.place)), name)
    if series.has_markers or len(series.x) <= FEW_POINTS:
        mark = Scatter(x="x", y="y", marker="diamond", size=8 + width, fill_color=ink, line_color=ink)
        draw(plot, source, mark, name)


def _width(number: int, num: int) -> float:
    """Wide below, narrow above: lines that lie on top of each other are all seen, up to four of them."""
    return 2 + 4 * max(0, min(num, 4) - 1 - number)


def scaling_charts(comparison: Comparison) -> list[Chart]:
    """Speed-up and efficiency of each strategy over the number of devices, beside what would be ideal."""
    base = comparison.rows[0]
    first = len(base.devices)
    rate = base.samples_per_second.middle
    most = max(len(row.devices) for row in comparison.rows)
    ends = [first, most]
    speedup = _scaling(comparison, lambda _, speed: speed / rate, ends, [1, most / first], "speed-up", "0.00")
    efficiency = _scaling(
        comparison, lambda row, speed: speed / rate * first / len(row.devices), ends, [1, 1], "efficiency", "0 %"
    )
    caption = "Bars show the slowest and the fastest round; the grey line is what so many devices could give at best."
    keys = _strategy_keys(comparison)
    return [
        Chart(name="speedup", title="Speed-up", figure=speedup, caption=caption, keys=keys),
        Chart(name="efficiency", title="Efficiency", figure=efficiency, keys=keys),
    ]


def _strategies(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(row.strategy for row in comparison.rows))


def _strategy_keys(comparison: Comparison) -> list[Key]:
    keys = [
        Key(name=f"strategy {place}", label=strategy, colour=colour(place))
        for place, strategy in enumerate(_strategies(comparison))
    ]
    return [*keys, Key(name="ideal", label="ideal", colour=OTHER)]


def _scaling(comparison: Comparison, scale: Scale, ends: list[int], ideal: list[float], y: str, number: str) -> figure:
    highest = max([*ideal, *(scale(row, row.samples_per_second.high) for row in comparison.rows)])
    tips = [("", "@label"), (y, f"@y{{{number}}}"), ("rounds", f"@low{{{number}}} to @high{{{number}}}")]
    room = max(0.25, (ends[1] - ends[0]) * 0.08)
    plot = blank(height=300, x="devices", y=y, tips=tips, x_range=(ends[0] - room, ends[1] + room))
    plot.y_range = from_zero(highest)
    plot.xaxis.ticker = FixedTicker(ticks=sorted({len(row.devices) for row in comparison.rows}))
    plot.yaxis.formatter = NumeralTickFormatter(format="0 %" if "%" in number else "0.0")
    _straight(plot, ends, ideal, "ideal", Line(x="x", y="y", line_color=OTHER, line_dash="dashed", line_width=1.5))
    for place, strategy in enumerate(_strategies(comparison)):
        _strategy_curve(plot, comparison, strategy, place, scale)
    return plot


def _straight(plot: figure, x: Sequence[float], y: Sequence[float], name: str, line: Line) -> None:
    # What a hover says of other lines is said of this one, too.
    columns = {
        "x": list(x),
        "y": list(y),
        "low": list(y),
        "high": list(y),
        "label": ["ideal" if name == "ideal" else ""] * 2,
    }
    draw(plot, ColumnDataSource(columns), line, name)


def _strategy_curve(plot: figure, comparison: Comparison, strategy: str, place: int, scale: Scale) -> None:
    rows = sorted((row for row in comparison.rows if row.strategy == strategy), key=lambda row: len(row.devices))
    name, ink = f"strategy {place}", colour(place)
    base = comparison.rows[0]
    if rows[0] is not base and len(rows[0].devices) > len(base.devices):
        # From where the others are measured: not a row of its own, so the line alone goes there.
        first = [len(base.devices), len(rows[0].devices)]
        begin = [scale(base, base.samples_per_second.middle), scale(rows[0], rows[0].samples_per_second.middle)]
        _straight(plot, first, begin, name, Line(x="x", y="y", line_color=ink, line_dash="dotted", line_width=2))
    source = ColumnDataSource(
        {
            "x": [len(row.devices) for row in rows],
            "y": [scale(row, row.samples_per_second.middle) for row in rows],
            "low": [scale(row, row.samples_per_second.low) for row in rows],
            "high": [scale(row, row.samples_per_second.high) for row in rows],
            "label": [label(row.label) for row in rows],
        }
    )
    draw(plot, source, Line(x="x", y="y", line_color=ink, line_width=2.5), name)
    draw(plot, source, Scatter(x="x", y="y", fill_color=ink, line_color=ink, size=10), name)
    head = TeeHead(size=8, line_color=ink)
    whisker = Whisker(source=source, base="x", lower="low", upper="high", lower_head=head, upper_head=head, name=name)
    whisker.line_color = ink
    plot.add_layout(whisker)
