"""Bars: what a step is made of, the step as a timeline, memory for each device, how long steps took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from bokeh.models import ColumnDataSource, FactorRange
from bokeh.models.glyphs import HBar, Scatter, Segment
from bokeh.plotting import figure

from evenstep.record import PARTS, Timeline
from evenstep.report.comparison import Comparison, Row, Spread
from evenstep.report.look import (
    OTHER,
    Chart,
    Key,
    blank,
    colour,
    draw,
    from_zero,
    label,
    labels,
    part_colour,
    part_kind,
)
from evenstep.report.thin import Quantiles, Sampled, evenly

ROW_HEIGHT = 34
MOST_LANES = 48
MOST_DOTS = 160


def _height(num_rows: int, row_height: int = ROW_HEIGHT) -> int:
    return 95 + row_height * num_rows


def parts_chart(comparison: Comparison) -> Chart:
    """The step of each row, cut into its parts; marks where it would end without input or communication."""
    rows = comparison.rows
    names = labels([row.label for row in rows])
    tips = [("", "@row: @part"), ("takes", "@ms{0.000} ms"), ("of the step", "@share{0.0 %}")]
    plot = blank(height=_height(len(rows)), x="ms", tips=tips, y_range=_down(names))
    plot.x_range = from_zero(1000 * max(map(_reach, rows)))
    plot.ygrid.grid_line_color = None
    for part in PARTS:
        source = ColumnDataSource(_part_columns(rows, names, part))
        ink = part_colour(part)
        bar = HBar(y="row", left="left", right="right", height=0.62, fill_color=ink, line_color=ink)
        draw(plot, source, bar, part)
    _ceilings(plot, rows, names)
    keys = [Key(name=part, label=part, colour=part_colour(part)) for part in PARTS]
    marks = [
        Key(name="ceilings nothing", label="┃ the whole step", colour=OTHER),
        Key(name="ceilings input", label="▼ the step without input", colour=part_colour("input")),
        Key(name="ceilings communication", label="◆ without communication", colour=part_colour("communication")),
    ]
    caption = (
        "Communication is what of it was not hidden behind backward. The marks are measured apart: how long the step "
        "takes when nobody times its parts, on a batch that is there already, and when nothing is sent."
    )
    return Chart(
        name="parts", title="A step, in parts", figure=plot, caption=caption, keys=[*keys, *marks], is_wide=True
    )


def _reach(row: Row) -> float:
    """The longest of what is drawn for a row."""
    marks = (row.step_seconds, row.without_input_seconds, row.without_communication_seconds)
    return max(sum(row.parts.values()), *(mark.middle for mark in marks if mark is not None))


def _down(names: Sequence[str]) -> FactorRange:
    """The first at the top."""
    return FactorRange(factors=list(reversed(names)), name="rows")


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
    whole: list[Spread | None] = [row.step_seconds for row in rows]
    without_input: list[Spread | None] = [row.without_input_seconds for row in rows]
    _marks(plot, rows, names, whole, "nothing", "dash")
    _marks(plot, rows, names, without_input, "input", "inverted_triangle")
    _marks(plot, rows, names, [row.without_communication_seconds for row in rows], "communication", "diamond")


def _marks(
    plot: figure, rows: Sequence[Row], names: Sequence[str], found: Sequence[Spread | None], part: str, marker: str
) -> None:
    there = [(name, row, one.middle) for name, row, one in zip(names, rows, found, strict=True) if one is not None]
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
    draw(plot, ColumnDataSource(columns), mark, f"ceilings {part}")


def typical(timelines: Sequence[Timeline]) -> Timeline | None:
    """The one whose length is in the middle."""
    there = [one for one in timelines if any(lane.spans for lane in one.lanes)]
    if not there:
        return None
    middle = median(map(length, there))
    return min(there, key=lambda one: abs(length(one) - middle))


def length(timeline: Timeline) -> float:
    """Seconds from the first begin to the last end."""
    return max((end for lane in timeline.lanes for _, _, end in lane.spans), default=0.0)


def timeline_charts(timelines: Mapping[str, Timeline]) -> list[Chart]:
    """A step of each strategy as its ranks spent it, on the same scale where they can be seen on it."""
    longest = max(map(length, timelines.values()), default=0.0)
    return [
        _timeline_chart(place, name, one, longest * 1000, is_one_of_many=len(timelines) > 1)
        for place, (name, one) in enumerate(timelines.items())
    ]


def _timeline_chart(place: int, name: str, timeline: Timeline, longest_ms: float, is_one_of_many: bool) -> Chart:
    shown = sorted(timeline.lanes, key=lambda lane: lane.rank)[:MOST_LANES]
    lanes = labels([f"rank {lane.rank} {lane.name}" for lane in shown])
    spans = [
        (lane_name, text, begin * 1000, end * 1000)
        for lane_name, lane in zip(lanes, shown, strict=True)
        for text, begin, end in lane.spans
    ]
    tips = [("", "@lane: @part"), ("takes", "@ms{0.000} ms"), ("from", "@left{0.000} to @right{0.000} ms")]
    plot = blank(height=_height(len(lanes), 30), x="ms", tips=tips, y_range=_down(lanes))
    # Among much longer ones, nothing could be seen of a short step.
    is_short = 4000 * length(timeline) < longest_ms
    plot.x_range = from_zero(1000 * length(timeline) if is_short else longest_ms)
    plot.ygrid.grid_line_color = None
    kinds = list(dict.fromkeys(part_kind(text) for _, text, _, _ in spans))
    for kind in kinds:
        _spans(plot, kind, [span for span in spans if part_kind(span[1]) == kind])
    keys = [Key(name=kind, label=kind, colour=part_colour(kind)) for kind in kinds]
    left_out = len(timeline.lanes) - len(shown)
    more = f" {left_out} more lanes are left out." if left_out else ""
    scale = (
        "It is much shorter than the longest, and has a scale of its own." if is_short else "All have the same scale."
    )
    caption = f"Step {timeline.step}, one of middle length.{more} {scale if is_one_of_many else ''}"
    return Chart(
        name=f"timeline-{place}",
        title="A step, as each rank spent it",
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
    draw(plot, ColumnDataSource(columns), bar, kind)


def memory_chart(rows: Mapping[str, Mapping[str, int]], places: Sequence[int]) -> Chart | None:
    """Peak memory of every device of every row."""
    bars = [
        (place, name, device, num_bytes)
        for place, (name, peaks) in zip(places, rows.items(), strict=True)
        for device, num_bytes in peaks.items()
    ][:MOST_LANES]
    if not bars:
        return None
    names = labels([f"{name} {device}" if len(rows) > 1 else device for _, name, device, _ in bars], 24)
    columns = {
        "row": names,
        "mib": [num_bytes / 2**20 for *_, num_bytes in bars],
        "colour": [colour(place) for place, *_ in bars],
    }
    plot = blank(
        height=_height(len(bars), 24), x="MiB", tips=[("", "@row"), ("peak", "@mib{0,0} MiB")], y_range=_down(names)
    )
    plot.x_range = from_zero(max(num_bytes for *_, num_bytes in bars) / 2**20)
    plot.x_range.name = "reach"
    plot.ygrid.grid_line_color = None
    source = ColumnDataSource(columns, name="memory")
    draw(plot, source, HBar(y="row", left=0, right="mib", height=0.7, fill_color="colour", line_color=None))
    caption = "The peak of every device; on a CPU it is the whole process, with torch itself in it."
    return Chart(name="memory", title="Memory", figure=plot, caption=caption)


def times_chart(rows: Mapping[str, Sampled], places: Sequence[int]) -> Chart | None:
    """How long the steps of every row took: each a dot, half of them in the box, nine of ten between the ends."""
    boxes = [
        (place, name, sampled.values, cuts)
        for place, (name, sampled) in zip(places, rows.items(), strict=True)
        if (cuts := Quantiles.of(sampled)) is not None
    ]
    if not boxes:
        return None
    names = labels([name for _, name, _, _ in boxes])
    tips = [("", "@row"), ("middle", "@middle{0.000} ms"), ("half of them", "@p25{0.000} to @p75{0.000} ms")]
    plot = blank(height=_height(len(boxes), 40), x="ms", tips=tips, y_range=_down(names))
    plot.x_range = from_zero(1000 * max(cuts.p95 for *_, cuts in boxes))
    plot.x_range.name = "reach"
    plot.ygrid.grid_line_color = None
    inks = [colour(place) for place, *_ in boxes]
    _dots(plot, names, inks, [seconds for _, _, seconds, _ in boxes])
    _boxes(plot, names, inks, [cuts for *_, cuts in boxes])
    caption = "Each dot is a step, the box holds half of them, the line nine of ten; what is slower yet is cut off."
    return Chart(name="times", title="How long steps take", figure=plot, caption=caption)


def _boxes(plot: figure, names: list[str], inks: list[str], cuts: Sequence[Quantiles]) -> None:
    columns: dict[str, list[float] | list[str]] = {"row": names, "colour": inks}
    for cut in ("p5", "p25", "middle", "p75", "p95"):
        columns[cut] = [1000 * getattr(one, cut) for one in cuts]
    source = ColumnDataSource(columns, name="boxes")
    draw(plot, source, Segment(x0="p5", x1="p95", y0="row", y1="row", line_color="colour", line_width=2))
    box = HBar(y="row", left="p25", right="p75", height=0.5, line_color="colour", fill_color="colour", fill_alpha=0.45)
    draw(plot, source, box)
    middle = Scatter(x="middle", y="row", marker="dash", angle=math.pi / 2, size=20, line_color="colour", line_width=3)
    draw(plot, source, middle)


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
    draw(plot, source, Scatter(x="ms", y="at", size=4, fill_color="colour", fill_alpha=0.35, line_color=None))
