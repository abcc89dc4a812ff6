"""How charts look: colours that can be read on white and on black, labels that are only ever text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, Range1d
from bokeh.models.glyph import Glyph
from bokeh.plotting import figure

from evenstep.report.progress import without_control
from evenstep.report.sheets import distinct

COLOURS = ("#3b82f6", "#d97706", "#a855f7", "#059669", "#ef4444", "#0891b2", "#ec4899", "#65a30d", "#7d8590")
"""Of the strategies or runs, in their order; each has a contrast of 3 to 1 or more on both backgrounds."""
DASHES = ("solid", "dashed", "dotted", "dotdash")
PART_COLOURS = {
    "input": "#d97706",
    "replicate": "#ec4899",
    "forward": "#0891b2",
    "backward": "#6d78f7",
    "communication": "#ef4444",
    "reduce": "#c026d3",
    "optimizer": "#059669",
}
OTHER = "#7d8590"
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
    """Charts with tabs share one place on the page, and its buttons choose between them."""
    is_wide: bool = False


def colour(place: int) -> str:
    """Of the strategy or run at this place; with many of them, colours come again with other dashes."""
    return COLOURS[place % len(COLOURS)]


def dash(place: int) -> str:
    """Of the line at this place."""
    return DASHES[place // len(COLOURS) % len(DASHES)]


def places(strategies: Sequence[str]) -> list[int]:
    """Places for rows of a comparison: one colour for each strategy, another dash for each of its device counts."""
    kinds = list(dict.fromkeys(strategies))
    return [
        kinds.index(strategy) + len(COLOURS) * strategies[:number].count(strategy)
        for number, strategy in enumerate(strategies)
    ]


def part_kind(name: str) -> str:
    """What a part of a step is drawn as: gradients on their way, in buckets or all at once, are communication."""
    return "communication" if name.startswith(("bucket", "gradients")) else name


def part_colour(name: str) -> str:
    """Of a part of a step."""
    return PART_COLOURS.get(part_kind(name), OTHER)


def label(text: str, longest: int = LONGEST_LABEL) -> str:
    """A name as a chart can show it: short, no control bytes, and never taken for TeX, which bokeh would fetch."""
    plain = " ".join(without_control(text).split())
    short = plain if len(plain) <= longest else plain[: longest - 1] + "…"
    return _MATHS.sub("\u200b", short)


def labels(names: Sequence[str], longest: int = LONGEST_LABEL) -> list[str]:
    """All of them, each different: an axis takes a name only once."""
    return distinct([label(name, longest) for name in names])


def blank(*, height: int, x: str = "", y: str = "", tips: Sequence[tuple[str, str]] = (), **options: Any) -> figure:
    """A figure with nothing in it, as wide as its place on the page."""
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        min_width=200,
        tools="xbox_zoom",
        # A finger that scrolls the page must not zoom a chart; the page's script turns this on for a mouse.
        active_drag=None,
        # Its bar would lie on the chart, and needs a stylesheet of its own in the dark.
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


def draw(plot: figure, source: ColumnDataSource, glyph: Glyph, name: str | None = None) -> None:
    """Draw the columns of a source; with one look, where bokeh's own shorthands make five, for selections."""
    plot.add_glyph(source, glyph, name=name)


def _set_fonts(plot: figure) -> None:
    for axis in plot.axis:
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.minor_tick_line_color = None
        axis.axis_label_text_color = axis.major_label_text_color = OTHER
    plot.grid.grid_line_alpha = 0.35


def from_zero(most: float) -> Range1d:
    """A range that begins at nothing and leaves some room above `most`."""
    return Range1d(start=0, end=most * 1.08 if math.isfinite(most) and most > 0 else 1)
