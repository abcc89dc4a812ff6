"""The charts of a prediction: bands are intervals, hollow marks are predicted, filled ones measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bokeh.models import ColumnDataSource, FixedTicker, NumeralTickFormatter, Range1d
from bokeh.models.glyphs import HBar, Line, Scatter, VArea
from bokeh.plotting import figure

from evenstep.report.html.charts import OTHER, Chart, Key, blank, colour, from_zero, labels, part_colour
from evenstep.report.html.charts import rows_figure as figure_of_rows
from evenstep.report.prediction import KNEE, PART_NAMES, Forecast, Prediction

WAIT_COLOURS = {
    "handling": "#0f766e",
    "contention": "#be123c",
    "stragglers": "#7c3aed",
    "waiting": "#a16207",
    "unexplained": "#db2777",
}
"""Of the parts that only a prediction tells apart."""


def charts_of(found: Forecast) -> list[Chart]:
    return [*curves_of(found), _parts(found)]


def curves_of(found: Forecast, first: Sequence[str] = ()) -> list[Chart]:
    """Efficiency and samples a second over devices, measured and predicted; `first` have the first colours."""
    names = _names(found)
    colours = {name: at for at, name in enumerate(dict.fromkeys([*first, *names])) if name in names}
    return [_efficiency(found, colours), _rates(found, colours)]


def _efficiency(found: Forecast, colours: Mapping[str, int]) -> Chart:
    plot = _curves(found, "efficiency", colours)
    caption = (
        "Samples a second for each device, over those of one device. The band is the 90 % interval of the prediction; "
        f"filled marks were measured; a diamond marks where efficiency falls below {KNEE:.0%}. "
        + " ".join(f"{knee.sentence}." for knee in found.knees)
    )
    return Chart(
        name="predicted-efficiency", title="Efficiency, predicted", figure=plot, caption=caption, keys=_keys(colours)
    )


def _rates(found: Forecast, colours: Mapping[str, int]) -> Chart:
    plot = _curves(found, "samples/s", colours)
    return Chart(name="predicted-rates", title="Samples a second, predicted", figure=plot, keys=_keys(colours))


def _keys(colours: Mapping[str, int]) -> list[Key]:
    keys = [Key(name=f"strategy {at}", label=name, colour=colour(at)) for name, at in colours.items()]
    return [*keys, Key(name="ideal", label="n times as fast", colour=OTHER)]


def _names(found: Forecast) -> list[str]:
    """Those that were measured first, as a comparison has them."""
    return list(dict.fromkeys([*(row.strategy for row in found.rows), *found.curves]))


def _curves(found: Forecast, what: str, colours: Mapping[str, int]) -> figure:
    every = [row for curve in found.curves.values() for row in curve] + found.rows
    most = max(row.devices for row in every)
    tips = [("", "@label"), ("devices", "@x{0,0}"), (what, "@shown"), ("interval", "@range")]
    is_share = what == "efficiency"
    axes = {"x_axis_type": "log", "y_axis_type": "linear" if is_share else "log"}
    plot = blank(height=320, x="devices", y=what, tips=tips, x_range=(0.9, most * 1.12), **axes)
    highest = max(_value(row, what, row.samples_per_second.high) for row in every)
    lowest = min(row.samples_per_second.low for row in every)
    plot.y_range = from_zero(highest) if is_share else Range1d(start=lowest / 1.5, end=highest * 1.5)
    plot.xaxis.ticker = FixedTicker(ticks=_ticks(most))
    plot.yaxis.formatter = NumeralTickFormatter(format="0 %" if what == "efficiency" else "0,0")
    one = next((row for curve in found.curves.values() for row in curve if row.devices == 1), None)
    if one is not None:
        _ideal(plot, one, most, what)
    for name, at in colours.items():
        _band(plot, found.curves.get(name, []), at, what)
        _marks(plot, [row for row in found.rows if row.strategy == name], at, what)
    if is_share:
        _knees(plot, found, most, colours)
    return plot


def _knees(plot: figure, found: Forecast, most: int, colours: Mapping[str, int]) -> None:
    """A diamond where a strategy falls below what is still worth its devices."""
    for knee in found.knees:
        if knee.devices is not None and knee.devices <= most:
            at = colours[knee.strategy]
            words = {
                "label": [f"{knee.strategy}: below {KNEE:.0%} from here on"],
                "shown": [f"{knee.efficiency:.0%}"],
                "range": [knee.limit],
            }
            curve = {row.devices: row.efficiency for row in found.curves.get(knee.strategy, [])}
            y = curve.get(knee.devices, knee.efficiency)
            source = ColumnDataSource({"x": [knee.devices], "y": [y], **words})
            mark = Scatter(x="x", y="y", size=13, marker="diamond", fill_color=colour(at), line_color=OTHER)
            plot.add_glyph(source, mark, name=f"strategy {at}")


def _ticks(most: int) -> list[int]:
    counts = [2**power for power in range(most.bit_length() + 1) if 2**power <= most]
    return counts if len(counts) <= 8 else counts[::2]


def _value(row: Prediction, what: str, rate: float) -> float:
    return row.efficiency * rate / row.samples_per_second.middle if what == "efficiency" else rate


def _ideal(plot: figure, one: Prediction, most: int, what: str) -> None:
    counts = [2 ** (power / 4) for power in range(4 * most.bit_length()) if 2 ** (power / 4) <= most]
    y = [1.0 if what == "efficiency" else one.samples_per_second.middle * count for count in counts]
    blank_words = [""] * len(counts)
    columns = {
        "x": counts,
        "y": y,
        "label": ["n times as fast"] * len(counts),
        "shown": blank_words,
        "range": blank_words,
    }
    line = Line(x="x", y="y", line_color=OTHER, line_dash="dashed", line_width=1.5)
    plot.add_glyph(ColumnDataSource(columns), line, name="ideal")


def _columns(rows: Sequence[Prediction], what: str) -> dict[str, list[object]]:
    ranges = [row.samples_per_second for row in rows]
    form = "{:.0%}" if what == "efficiency" else "{:,.0f}"
    values = {
        edge: [_value(row, what, getattr(rate, edge)) for row, rate in zip(rows, ranges, strict=True)]
        for edge in ("middle", "low", "high")
    }
    return {
        "x": [row.devices for row in rows],
        "y": list(values["middle"]),
        "low": list(values["low"]),
        "high": list(values["high"]),
        "label": [f"{row.label}, {'measured' if row.is_measured else 'predicted'}" for row in rows],
        "shown": [form.format(value) for value in values["middle"]],
        "range": [
            f"{form.format(low)} to {form.format(high)}"
            for low, high in zip(values["low"], values["high"], strict=True)
        ],
    }


def _band(plot: figure, rows: Sequence[Prediction], at: int, what: str) -> None:
    source, ink = ColumnDataSource(_columns(rows, what)), colour(at)
    plot.add_glyph(source, VArea(x="x", y1="low", y2="high", fill_color=ink, fill_alpha=0.16), name=f"strategy {at}")
    plot.add_glyph(source, Line(x="x", y="y", line_color=ink, line_dash="dashed", line_width=2), name=f"strategy {at}")


def _marks(plot: figure, rows: Sequence[Prediction], at: int, what: str) -> None:
    for is_measured in (False, True):
        chosen = [row for row in rows if row.is_measured == is_measured]
        fill = colour(at) if is_measured else None
        mark = Scatter(x="x", y="y", size=9, line_color=colour(at), line_width=2, fill_color=fill)
        plot.add_glyph(ColumnDataSource(_columns(chosen, what)), mark, name=f"strategy {at}")


def _ink(part: str) -> str:
    return WAIT_COLOURS.get(part) or part_colour(part)


def _parts(found: Forecast) -> Chart:
    rows = found.rows
    plain = [label.removesuffix(" (measured)") for label in found.labels]
    names = labels([label + " ●" * row.is_measured for label, row in zip(plain, rows, strict=True)])
    parts = list(dict.fromkeys(name for row in rows for name in row.parts))
    tips = [("", "@row: @part"), ("takes", "@ms{0.000} ms")]
    plot = figure_of_rows(names, 30, 1000 * max(sum(row.parts.values()) for row in rows), tips)
    ends = [0.0] * len(rows)
    for part in parts:
        ms = [1000 * row.parts.get(part, 0.0) for row in rows]
        right = [end + more for end, more in zip(ends, ms, strict=True)]
        columns = {
            "row": names,
            "part": [PART_NAMES.get(part, part)] * len(rows),
            "left": ends,
            "right": right,
            "ms": ms,
        }
        ink = _ink(part)
        bar = HBar(y="row", left="left", right="right", height=0.62, fill_color=ink, line_color=ink)
        plot.add_glyph(ColumnDataSource(columns), bar, name=part)
        ends = right
    keys = [
        Key(name=part, label=PART_NAMES.get(part, part), colour=WAIT_COLOURS.get(part) or part_colour(part))
        for part in parts
    ]
    caption = (
        "● was measured. Memory: copying and summing gradients there. Slowest: waiting for the slowest rank. "
        "Reading: waiting for what a machine cannot read faster."
    )
    return Chart(name="parts", title="Parts of a step", figure=plot, caption=caption, keys=keys, is_wide=True)
