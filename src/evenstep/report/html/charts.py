"""The charts of a page: scaling, losses and metrics, parts and timelines of a step, memory and step times.

Figures use bokeh's glyphs, not its shorthands, which make five glyphs of each for selections.
Colours are readable on white and on black, and labels are never interpreted as markup or TeX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    FactorRange,
    FixedTicker,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.models.annotations import TeeHead, Whisker
from bokeh.models.glyphs import HBar, Line, Scatter, Segment
from bokeh.plotting import figure

from evenstep.record import PARTS, Evaluation, Timeline, parts_shown
from evenstep.report.comparison import Comparison, Range, Row
from evenstep.report.html.curves import Curves, Quantiles, ReadRun, Sampled, Thinned, evenly
from evenstep.report.html.tables import distinct
from evenstep.report.terminal import without_control

COLOURS = ("#3b82f6", "#d97706", "#a855f7", "#059669", "#ef4444", "#0891b2", "#ec4899", "#65a30d", "#7d8590")
"""Of the strategies or runs, in their order; each has a contrast of 3 to 1 or more on both backgrounds."""
DASHES = ("solid", "dashed", "dotted", "dotdash")
OTHER = "#7d8590"
PART_COLOURS = {
    "input": "#d97706",
    "replicate": "#ec4899",
    "forward": "#0891b2",
    "backward": "#6d78f7",
    "communication": "#ef4444",
    "reduce": "#c026d3",
    "bubble": OTHER,
    "optimizer": "#059669",
}
FONT = "system-ui, sans-serif"
LONGEST_LABEL = 20
_MATHS = re.compile(r"(?<=[$\\])(?=[$(\[\])])")


@dataclass(frozen=True, kw_only=True)
class Key:
    """One line of a legend: what is drawn under this name in this colour."""

    name: str
    label: str
    colour: str
    dash: str = "solid"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure and the words around it."""

    name: str
    title: str
    figure: figure
    caption: str = ""
    keys: Sequence[Key] = ()
    tab: str = ""
    """Charts with tabs share one section of the page, whose buttons choose between them."""
    is_wide: bool = False


def colour(index: int) -> str:
    """The colour of a strategy or run; with many of them, colours are repeated with other dashes."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    return DASHES[index // len(COLOURS) % len(DASHES)]


def colour_indices(strategies: Sequence[str]) -> list[int]:
    """Indices for rows of a comparison: one colour for each strategy, another dash for each of its device counts."""
    kinds = list(dict.fromkeys(strategies))
    return [
        kinds.index(strategy) + len(COLOURS) * strategies[:number].count(strategy)
        for number, strategy in enumerate(strategies)
    ]


def part_kind(name: str) -> str:
    """What a part of a step is drawn as: sending anything, in buckets or all at once, is communication."""
    return "communication" if name.startswith(("bucket", "gradients", "activations")) else name


def part_colour(name: str) -> str:
    return PART_COLOURS.get(part_kind(name), OTHER)


def label(text: str, longest: int = LONGEST_LABEL) -> str:
    """A name as a chart can show it: short, no control bytes, and never taken for TeX, which bokeh would fetch."""
    plain = " ".join(without_control(text).split())
    short = plain if len(plain) <= longest else plain[: longest - 1] + "…"
    return _MATHS.sub("\u200b", short)


def labels(names: Sequence[str], longest: int = LONGEST_LABEL) -> list[str]:
    """All of them, made distinct: an axis takes a name only once."""
    return distinct([label(name, longest) for name in names])


def blank(*, height: int, x: str = "", y: str = "", tips: Sequence[tuple[str, str]] = (), **options: Any) -> figure:
    """A figure with nothing in it, as wide as its section of the page."""
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        min_width=200,
        tools="xbox_zoom",
        # A finger that scrolls the page must not zoom a chart; the page's script turns this on for a mouse.
        active_drag=None,
        # The toolbar would cover the chart, and needs another stylesheet in dark mode.
        toolbar_location=None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        x_axis_label=x or None,
        y_axis_label=y or None,
        **options,
    )
    _set_fonts(plot)
    if tips:
        plot.add_tools(HoverTool(tooltips=list(tips), visible=False))
    return plot


def _set_fonts(plot: figure) -> None:
    for axis in plot.axis:
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.minor_tick_line_color = None
        axis.axis_label_text_color = axis.major_label_text_color = OTHER
    plot.grid.grid_line_alpha = 0.35


def from_zero(most: float) -> Range1d:
    """A range from zero to a little above `most`."""
    return Range1d(start=0, end=most * 1.08 if math.isfinite(most) and most > 0 else 1)


FEW_POINTS = 2
"""Of up to this number of points, a line alone would hardly be seen."""
Scale = Callable[[Row, float], float]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A run, with its name and colour on the page."""

    label: str
    index: int
    run: ReadRun

    @property
    def evaluations(self) -> list[Evaluation]:
        return self.run.record.evaluations


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart, and whose it is."""

    name: str
    label: str
    index: int
    x: Sequence[float]
    y: Sequence[float]
    is_line: bool = True
    has_markers: bool = False


def loss_chart(runs: Sequence[Drawn]) -> Chart | None:
    """The loss of every step, and diamonds where the validation set was gone through."""
    lines = _of_steps(runs, lambda curves: curves.loss) + _of_evaluations(runs, "loss", is_line=False)
    caption = "Lines on top of each other mean equal losses: the first is drawn widest, the others inside it."
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
    caption = "Every step; in a long run, the slowest and the fastest of each interval."
    plot = _lines(_of_steps(runs, lambda curves: curves.samples_per_second), y="samples/s", tip="0,0")
    return _step_chart(runs, plot, "speed", "Speed", caption)


def input_chart(runs: Sequence[Drawn]) -> Chart | None:
    plot = _lines(_of_steps(runs, lambda curves: curves.input_ms), y="ms", tip="0.000")
    return _step_chart(runs, plot, "input", "Wait for input", "How long each step waited for its batch.")


def lr_chart(runs: Sequence[Drawn]) -> Chart | None:
    if not any(run.run.curves.lr_changes for run in runs):
        return None
    plot = _lines(_of_steps(runs, lambda curves: curves.lr), y="learning rate", tip="0.000e+0")
    return _step_chart(runs, plot, "lr", "Learning rate", "Of the optimizer's first parameter group.")


def grad_norm_chart(runs: Sequence[Drawn]) -> Chart | None:
    """Where gradients are clipped; None elsewhere."""
    plot = _lines(_of_steps(runs, lambda curves: curves.grad_norm), y="norm", tip="0.000e+0")
    return _step_chart(runs, plot, "norm", "Gradient norm", "Of all gradients of a step, before they are clipped.")


def _step_chart(runs: Sequence[Drawn], plot: figure | None, name: str, title: str, caption: str) -> Chart | None:
    return Chart(name=name, title=title, figure=plot, keys=_keys(runs), caption=caption) if plot else None


def logged_charts(runs: Sequence[Drawn], most: int = 12) -> list[Chart]:
    """One chart for each of the first names that losses gave to `evenstep.log`."""
    charts = []
    names = dict.fromkeys(name for run in runs for name in run.run.curves.logged)
    for number, name in enumerate(list(names)[:most]):
        lines = _of_steps(runs, partial(Curves.logged_as, name=name))
        plot = _lines(lines, y=label(name), tip="0.00000", is_nested=True)
        if plot is not None:
            charts.append(Chart(name=f"logged-{number}", title=f"Train {name}", figure=plot, keys=_keys(runs)))
    return charts


LAYER_CHARTS = {
    "parameters": ("norm", "Parameters by layer", "The norm of each parameter after a step."),
    "gradients": ("norm", "Gradients by layer", "The norm of each parameter's gradient, before clipping."),
    "outputs": ("std", "Outputs by layer", "The standard deviation of what each layer returns, over the global batch."),
}


def layer_charts(runs: Sequence[Drawn], most: int = 18) -> list[Chart]:
    """What `--statistics` recorded of the first layers, on a page of one run."""
    rows = runs[0].run.record.statistics if len(runs) == 1 else []
    charts = []
    for kind, (what, title, caption) in LAYER_CHARTS.items():
        found = [(row.step, getattr(row, kind)) for row in rows]
        names = list(dict.fromkeys(name for _, layers in found for name in layers))[:most]
        lines = [_layer_series(number, name, what, found) for number, name in enumerate(names)]
        plot = _lines(lines, y=what, tip="0.000e+0")
        keys = [
            Key(name=one.name, label=label(one.label, 60), colour=colour(one.index), dash=dash(one.index))
            for one in lines
        ]
        if plot is not None:
            charts.append(Chart(name=kind, title=title, figure=plot, keys=keys, caption=caption))
    return charts


def _layer_series(number: int, name: str, what: str, found: Sequence[tuple[int, Mapping[str, Any]]]) -> Series:
    points = Thinned.of((step, getattr(layers[name], what)) for step, layers in found if name in layers).points()
    x, y = [x for x, _ in points], [y for _, y in points]
    return Series(name=f"layer {number}", label=name or "model", index=number, x=x, y=y)


def _keys(runs: Sequence[Drawn]) -> list[Key]:
    return [
        Key(name=f"run {number}", label=run.label, colour=colour(run.index), dash=dash(run.index))
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
    return Series(name=f"run {number}", label=name, index=run.index, x=x, y=y)


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
    ink, name = colour(series.index), series.name
    if series.is_line:
        plot.add_glyph(
            source, Line(x="x", y="y", line_color=ink, line_width=width, line_dash=dash(series.index)), name=name
        )
    if series.has_markers or len(series.x) <= FEW_POINTS:
        mark = Scatter(x="x", y="y", marker="diamond", size=8 + width, fill_color=ink, line_color=ink)
        plot.add_glyph(source, mark, name=name)


def _width(number: int, num: int) -> float:
    """Wide below, narrow above: lines that lie on top of each other are all seen, up to four of them."""
    return 2 + 4 * max(0, min(num, 4) - 1 - number)


def scaling_charts(comparison: Comparison) -> list[Chart]:
    """Speed-up and efficiency of each strategy over the number of devices, beside what would be ideal."""
    base = comparison.rows[0]
    first, most = _ends(comparison)
    rate = base.samples_per_second.middle
    speedup = _scaling(comparison, lambda _, speed: speed / rate, [1, most / first], "speed-up", "0.00")
    efficiency = _scaling(
        comparison, lambda row, speed: speed / rate * first / len(row.devices), [1, 1], "efficiency", "0 %"
    )
    caption = "Bars show the slowest and the fastest round; the grey line is ideal scaling."
    keys = _strategy_keys(comparison)
    return [
        Chart(name="speedup", title="Speed-up", figure=speedup, caption=caption, keys=keys),
        Chart(name="efficiency", title="Efficiency", figure=efficiency, keys=keys),
    ]


def _strategies(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(row.series for row in comparison.rows))


def _strategy_keys(comparison: Comparison) -> list[Key]:
    keys = [
        Key(name=f"strategy {index}", label=strategy, colour=colour(index))
        for index, strategy in enumerate(_strategies(comparison))
    ]
    return [*keys, Key(name="ideal", label="ideal", colour=OTHER)]


def _ends(comparison: Comparison) -> list[int]:
    """The devices of the baseline, and the most of any row."""
    return [len(comparison.rows[0].devices), max(len(row.devices) for row in comparison.rows)]


def _scaling(comparison: Comparison, scale: Scale, ideal: list[float], y: str, number: str) -> figure:
    ends = _ends(comparison)
    highest = max([*ideal, *(scale(row, row.samples_per_second.high) for row in comparison.rows)])
    tips = [("", "@label"), (y, f"@y{{{number}}}"), ("rounds", f"@low{{{number}}} to @high{{{number}}}")]
    margin = max(0.25, (ends[1] - ends[0]) * 0.08)
    plot = blank(height=300, x="devices", y=y, tips=tips, x_range=(ends[0] - margin, ends[1] + margin))
    plot.y_range = from_zero(highest)
    plot.xaxis.ticker = FixedTicker(ticks=sorted({len(row.devices) for row in comparison.rows}))
    plot.yaxis.formatter = NumeralTickFormatter(format="0 %" if "%" in number else "0.0")
    _straight(plot, ends, ideal, "ideal", Line(x="x", y="y", line_color=OTHER, line_dash="dashed", line_width=1.5))
    for index, strategy in enumerate(_strategies(comparison)):
        _strategy_curve(plot, comparison, strategy, index, scale)
    return plot


def _straight(plot: figure, x: Sequence[float], y: Sequence[float], name: str, line: Line) -> None:
    # The same tooltip as for other lines.
    columns = {"x": x, "y": y, "low": y, "high": y, "label": ["ideal" if name == "ideal" else ""] * 2}
    plot.add_glyph(ColumnDataSource(columns), line, name=name)


def _strategy_curve(plot: figure, comparison: Comparison, strategy: str, index: int, scale: Scale) -> None:
    rows = sorted((row for row in comparison.rows if row.series == strategy), key=lambda row: len(row.devices))
    name, ink = f"strategy {index}", colour(index)
    base = comparison.rows[0]
    if rows[0] is not base and len(rows[0].devices) > len(base.devices):
        # The line starts at the baseline, which is another strategy, so it gets no marker there.
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
    plot.add_glyph(source, Line(x="x", y="y", line_color=ink, line_width=2.5), name=name)
    plot.add_glyph(source, Scatter(x="x", y="y", fill_color=ink, line_color=ink, size=10), name=name)
    head = TeeHead(size=8, line_color=ink)
    whisker = Whisker(source=source, base="x", lower="low", upper="high", lower_head=head, upper_head=head, name=name)
    whisker.line_color = ink
    plot.add_layout(whisker)


MOST_LANES = 48
MOST_DOTS = 160


def rows_figure(
    names: Sequence[str], row_height: int, most: float, tips: Sequence[tuple[str, str]], x: str = "ms"
) -> figure:
    """A figure with a row for each name, the first at the top, and an axis from zero to a little above `most`."""
    rows = FactorRange(factors=list(reversed(names)), name="rows")
    plot = blank(height=95 + row_height * len(names), x=x, tips=tips, y_range=rows)
    plot.x_range = from_zero(most)
    plot.ygrid.grid_line_color = None
    return plot


def parts_chart(comparison: Comparison) -> Chart:
    """The step of each row, cut into its parts; marks where it would end without input or communication."""
    rows = comparison.rows
    names = labels([row.label for row in rows])
    tips = [("", "@row: @part"), ("takes", "@ms{0.000} ms"), ("of the step", "@share{0.0 %}")]
    plot = rows_figure(names, 34, 1000 * max(map(_reach, rows)), tips)
    shown = parts_shown([row.parts for row in rows])
    for part in shown:
        source = ColumnDataSource(_part_columns(rows, names, part))
        ink = part_colour(part)
        bar = HBar(y="row", left="left", right="right", height=0.62, fill_color=ink, line_color=ink)
        plot.add_glyph(source, bar, name=part)
    _ceilings(plot, rows, names)
    keys = [Key(name=part, label=part, colour=part_colour(part)) for part in shown]
    marks = [
        Key(name="ceilings nothing", label="┃ the whole step", colour=OTHER),
        Key(name="ceilings input", label="▼ the step without input", colour=part_colour("input")),
        Key(name="ceilings communication", label="◆ without communication", colour=part_colour("communication")),
    ]
    caption = (
        "Communication is what does not overlap with backward. The marks are measured separately: the step without "
        "timing its parts, with its batch already loaded, and without communication."
    )
    return Chart(
        name="parts", title="Parts of a step", figure=plot, caption=caption, keys=[*keys, *marks], is_wide=True
    )


def _reach(row: Row) -> float:
    marks = (row.step_seconds, row.without_input_seconds, row.without_communication_seconds)
    return max(sum(row.parts.values()), *(mark.middle for mark in marks if mark is not None))


def _part_columns(rows: Sequence[Row], names: list[str], part: str) -> dict[str, list[float] | list[str]]:
    before = PARTS[: PARTS.index(part)]
    left = [1000 * sum(row.parts.get(one, 0.0) for one in before) for row in rows]
    ms = [1000 * row.parts.get(part, 0.0) for row in rows]
    whole = [1000 * sum(row.parts.values()) or 1.0 for row in rows]
    return {
        "row": names,
        "part": [part] * len(rows),
        "left": left,
        "right": [begin + one for begin, one in zip(left, ms, strict=True)],
        "ms": ms,
        "share": [one / all_ms for one, all_ms in zip(ms, whole, strict=True)],
    }


def _ceilings(plot: figure, rows: Sequence[Row], names: Sequence[str]) -> None:
    named = list(zip(names, rows, strict=True))
    _marks(plot, [(name, row, row.step_seconds) for name, row in named], "nothing", "dash")
    _marks(plot, [(name, row, row.without_input_seconds) for name, row in named], "input", "inverted_triangle")
    _marks(plot, [(name, row, row.without_communication_seconds) for name, row in named], "communication", "diamond")


def _marks(plot: figure, found: Sequence[tuple[str, Row, Range | None]], part: str, marker: str) -> None:
    there = [(name, row, one.middle) for name, row, one in found if one is not None]
    columns = {
        "row": [name for name, _, _ in there],
        "ms": [1000 * seconds for _, _, seconds in there],
        "part": [f"without {part}" if part in PARTS else "the whole step"] * len(there),
        "share": [seconds / (row.step_seconds.middle or 1.0) for _, row, seconds in there],
    }
    mark = Scatter(
        x="ms",
        y="row",
        marker=marker,
        size=13 if part in PARTS else 26,
        angle=0 if part in PARTS else math.pi / 2,
        fill_color=part_colour(part),
        line_color="white" if part in PARTS else OTHER,
        line_width=1.5 if part in PARTS else 3,
    )
    plot.add_glyph(ColumnDataSource(columns), mark, name=f"ceilings {part}")


def typical(timelines: Sequence[Timeline]) -> Timeline | None:
    """The one whose length is in the middle."""
    there = [one for one in timelines if any(lane.spans for lane in one.lanes)]
    if not there:
        return None
    middle = median(map(length, there))
    return min(there, key=lambda one: abs(length(one) - middle))


def length(timeline: Timeline) -> float:
    return max((end for lane in timeline.lanes for _, _, end in lane.spans), default=0.0)


def timeline_charts(timelines: Mapping[str, Timeline]) -> list[Chart]:
    """A step of each strategy as its ranks spent it, on the same scale where they can be seen on it."""
    longest = max(map(length, timelines.values()), default=0.0)
    return [
        _timeline_chart(index, name, one, longest * 1000, is_one_of_many=len(timelines) > 1)
        for index, (name, one) in enumerate(timelines.items())
    ]


def _timeline_chart(index: int, name: str, timeline: Timeline, longest_ms: float, is_one_of_many: bool) -> Chart:
    shown = sorted(timeline.lanes, key=lambda lane: lane.rank)[:MOST_LANES]
    lanes = labels([f"rank {lane.rank} {lane.name}" for lane in shown])
    spans = [
        (lane_name, text, begin * 1000, end * 1000)
        for lane_name, lane in zip(lanes, shown, strict=True)
        for text, begin, end in lane.spans
    ]
    tips = [("", "@lane: @part"), ("takes", "@ms{0.000} ms"), ("from", "@left{0.000} to @right{0.000} ms")]
    # Among much longer ones, nothing could be seen of a short step.
    is_short = 4000 * length(timeline) < longest_ms
    plot = rows_figure(lanes, 30, 1000 * length(timeline) if is_short else longest_ms, tips)
    kinds = list(dict.fromkeys(part_kind(text) for _, text, _, _ in spans))
    for kind in kinds:
        _spans(plot, kind, [span for span in spans if part_kind(span[1]) == kind])
    keys = [Key(name=kind, label=kind, colour=part_colour(kind)) for kind in kinds]
    left_out = len(timeline.lanes) - len(shown)
    more = f" {left_out} more lanes are left out." if left_out else ""
    scale = "It is much shorter than the longest, and has its own scale." if is_short else "All steps share one scale."
    caption = f"Step {timeline.step}, of median length.{more} {scale if is_one_of_many else ''}"
    return Chart(
        name=f"timeline-{index}",
        title="Timeline of a step, by rank",
        figure=plot,
        caption=caption,
        keys=keys,
        tab=name,
    )


def _spans(plot: figure, kind: str, spans: Sequence[tuple[str, str, float, float]]) -> None:
    columns = {
        "lane": [lane for lane, _, _, _ in spans],
        "part": [label(text) for _, text, _, _ in spans],
        "left": [begin for _, _, begin, _ in spans],
        "right": [end for _, _, _, end in spans],
        "ms": [end - begin for _, _, begin, end in spans],
    }
    ink = part_colour(kind)
    bar = HBar(y="lane", left="left", right="right", height=0.66, fill_color=ink, fill_alpha=0.88, line_color=ink)
    plot.add_glyph(ColumnDataSource(columns), bar, name=kind)


def memory_chart(rows: Mapping[str, Mapping[str, int]], indices: Sequence[int]) -> Chart | None:
    bars = [
        (index, name, device, num_bytes)
        for index, (name, peaks) in zip(indices, rows.items(), strict=True)
        for device, num_bytes in peaks.items()
    ][:MOST_LANES]
    if not bars:
        return None
    names = labels([f"{name} {device}" if len(rows) > 1 else device for _, name, device, _ in bars], 24)
    columns = {
        "row": names,
        "mib": [num_bytes / 2**20 for *_, num_bytes in bars],
        "colour": [colour(index) for index, *_ in bars],
    }
    most = max(num_bytes for *_, num_bytes in bars) / 2**20
    plot = rows_figure(names, 24, most, [("", "@row"), ("peak", "@mib{0,0} MiB")], x="MiB")
    plot.x_range.name = "reach"
    source = ColumnDataSource(columns, name="memory")
    plot.add_glyph(source, HBar(y="row", left=0, right="mib", height=0.7, fill_color="colour", line_color=None))
    caption = "Peak memory of each device; on a CPU, of the whole process, torch included."
    return Chart(name="memory", title="Memory", figure=plot, caption=caption)


def times_chart(rows: Mapping[str, Sampled], indices: Sequence[int]) -> Chart | None:
    """How long the steps of every row took: each a dot, half of them in the box, nine of ten between the ends."""
    boxes = [
        (index, name, sampled.values, cuts)
        for index, (name, sampled) in zip(indices, rows.items(), strict=True)
        if (cuts := Quantiles.of(sampled)) is not None
    ]
    if not boxes:
        return None
    names = labels([name for _, name, _, _ in boxes])
    tips = [("", "@row"), ("median", "@middle{0.000} ms"), ("middle 50 %", "@p25{0.000} to @p75{0.000} ms")]
    plot = rows_figure(names, 40, 1000 * max(cuts.p95 for *_, cuts in boxes), tips)
    plot.x_range.name = "reach"
    inks = [colour(index) for index, *_ in boxes]
    _dots(plot, names, inks, [seconds for _, _, seconds, _ in boxes])
    _boxes(plot, names, inks, [cuts for *_, cuts in boxes])
    caption = "Each dot is a step; the box spans the middle 50 %, the line 5 % to 95 %; slower steps are cut off."
    return Chart(name="times", title="Step times", figure=plot, caption=caption)


def _boxes(plot: figure, names: list[str], inks: list[str], cuts: Sequence[Quantiles]) -> None:
    columns: dict[str, list[float] | list[str]] = {"row": names, "colour": inks}
    for cut in ("p5", "p25", "middle", "p75", "p95"):
        columns[cut] = [1000 * getattr(one, cut) for one in cuts]
    source = ColumnDataSource(columns, name="boxes")
    plot.add_glyph(source, Segment(x0="p5", x1="p95", y0="row", y1="row", line_color="colour", line_width=2))
    box = HBar(y="row", left="p25", right="p75", height=0.5, line_color="colour", fill_color="colour", fill_alpha=0.45)
    plot.add_glyph(source, box)
    middle = Scatter(x="middle", y="row", marker="dash", angle=math.pi / 2, size=20, line_color="colour", line_width=3)
    plot.add_glyph(source, middle)


def _dots(plot: figure, names: list[str], inks: list[str], rows: Sequence[Sequence[float]]) -> None:
    # Shifted up and down in turn: dots of equal steps would hide each other.
    dots = [
        (name, (number * 7 % 19 - 9) / 28, 1000 * seconds, ink)
        for name, ink, all_seconds in zip(names, inks, rows, strict=True)
        for number, seconds in enumerate(evenly(all_seconds, MOST_DOTS))
    ]
    columns = {
        "at": [(name, shift) for name, shift, _, _ in dots],
        "ms": [ms for _, _, ms, _ in dots],
        "colour": [ink for *_, ink in dots],
    }
    source = ColumnDataSource(columns, name="dots")
    plot.add_glyph(source, Scatter(x="ms", y="at", size=4, fill_color="colour", fill_alpha=0.35, line_color=None))
