"""The charts of a study: its history, what the best came to by how many steps, the space, and what matters in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.core.properties import value as constant
from bokeh.models import BasicTicker, ColumnDataSource, FixedTicker, NumeralTickFormatter
from bokeh.models.glyphs import HBar, Line, MultiLine, Scatter, Segment, Text, VBar
from bokeh.palettes import viridis
from bokeh.plotting import figure

from evenstep.best_metric import parse_best
from evenstep.plan import OptionValue
from evenstep.report.html.charts import FONT, OTHER, Chart, Key, blank, colour, from_zero, label, labels, rows_figure
from evenstep.tune.space import Dimension, in_words
from evenstep.tune.study_rows import Reached
from evenstep.tune.successive_halving import Study, StudyTrial

SHADES = 256
LABEL_OFFSET = 11
MOST_TICKS = 7
"""Choices that an axis names."""


def charts_of(study: Study, importances: Mapping[str, float]) -> list[Chart]:
    if not study.ranking(0):
        return []
    found = [_history(study), _progress(study), _coordinates(study), _importance(importances), _steps(study)]
    return [chart for chart in found if chart is not None]


def _rung(study: Study, rung: int) -> str:
    return f"best by epoch {study.request.rungs[rung]}" if study.request.rungs else "best"


def _keys(study: Study) -> list[Key]:
    return [
        Key(name=f"rung {rung}", label=_rung(study, rung), colour=colour(rung))
        for rung in range(study.request.num_rungs)
        if study.ranking(rung)
    ]


def _history(study: Study) -> Chart:
    metric = label(parse_best(study.request.metric)[0])
    tips = [("trial", "@x"), (metric, "@y{0.0000}"), ("", "@rung"), ("", "@options")]
    plot = blank(height=320, x="trial", y=metric, tips=tips)
    plot.xaxis.ticker = BasicTicker(min_interval=1)
    for rung in range(study.request.num_rungs):
        there = sorted(study.ranking(rung), key=lambda trial: trial.number)
        source = ColumnDataSource(_marks(there, [trial.reached[rung] for trial in there], _rung(study, rung)))
        mark = Scatter(x="x", y="y", size=8, fill_color=colour(rung), line_color=colour(rung), fill_alpha=0.7)
        plot.add_glyph(source, mark, name=f"rung {rung}")
    best = _best_so_far(study)
    words = {"rung": ["best so far"] * len(best), "options": [""] * len(best)}
    source = ColumnDataSource({"x": [x for x, _ in best], "y": [y for _, y in best], **words})
    plot.add_glyph(source, Line(x="x", y="y", line_color=OTHER, line_width=1.8), name="best")
    keys = [*_keys(study), Key(name="best", label="best so far", colour=OTHER)]
    caption = "Each trial at the rungs that it reached: its best up to there. The line is the best of all trials."
    return Chart(name="history", title="History", figure=plot, caption=caption, keys=keys)


def _marks(trials: Sequence[StudyTrial], rows: Sequence[Reached], rung: str) -> dict[str, list[object]]:
    return {
        "x": [trial.number for trial in trials],
        "y": [row.value for row in rows],
        "rung": [rung] * len(rows),
        "options": [label(in_words(trial.options), 80) for trial in trials],
    }


def _best_so_far(study: Study) -> list[tuple[int, float]]:
    """A step at each trial that is better than all before it."""
    points: list[tuple[int, float]] = []
    for number, trial in sorted(study.trials.items()):
        if trial.reached:
            value = study.sign * min(study.sign * row.value for row in trial.reached)
            before = points[-1][1] if points else value
            best = study.sign * min(study.sign * value, study.sign * before)
            points += [(number, before), (number, best)]
    return points


def _progress(study: Study) -> Chart | None:
    """The best value over the steps of all trials together."""
    rows = sorted((row for trial in study.trials.values() for row in trial.reached), key=lambda row: row.at)
    at: dict[int, int] = {}
    x, y = [0.0], [rows[0].value]
    for row in rows:
        at[row.trial] = row.step
        steps = sum(at.values())
        best = study.sign * min(study.sign * y[-1], study.sign * row.value)
        x += [steps, steps]
        y += [y[-1], best]
    metric = label(parse_best(study.request.metric)[0])
    plot = blank(height=320, x="steps of all trials", y=metric, tips=[("steps", "@x{0,0}"), (metric, "@y{0.0000}")])
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[0]a")
    plot.add_glyph(ColumnDataSource({"x": x, "y": y}), Line(x="x", y="y", line_color=colour(0), line_width=2))
    caption = "The best so far, by the steps that all trials together had taken."
    return Chart(name="progress", title="Best by steps", figure=plot, caption=caption)


def _position(one: Dimension, value: OptionValue) -> float:
    """Where a value stands on its axis, from 0 to 1."""
    if one.kind == "choice":
        return one.choices.index(value) / max(1, len(one.choices) - 1)
    low, high, at = one.low, one.high, float(value)  # type: ignore[arg-type]
    if one.is_log:
        low, high, at = math.log(low), math.log(high), math.log(at)
    return (at - low) / (high - low)


def _ticks(one: Dimension) -> list[tuple[float, str]]:
    if one.kind == "choice" and len(one.choices) <= MOST_TICKS:
        return [(_position(one, choice), str(choice)) for choice in one.choices]
    if one.kind == "choice":
        return [(0.0, str(one.choices[0])), (1.0, str(one.choices[-1]))]
    return [(0.0, f"{one.low:.4g}"), (1.0, f"{one.high:.4g}")]


def _coordinates(study: Study) -> Chart:
    """A line for each trial, through the values of its options to its first rung; the better, the brighter."""
    trials = list(reversed(study.ranking(0)))
    space = study.request.space
    values = [trial.reached[0].value for trial in trials]
    low, high = min(values), max(values)
    # A few bad trials would press all others together: ranks are even.
    inks = viridis(SHADES)
    shade = [inks[round(at * (SHADES - 1) / max(1, len(trials) - 1))] for at in range(len(trials))]
    last = len(space)
    heights = [(value - low) / (high - low) if high > low else 0.5 for value in values]
    lines = [
        [*(_position(one, trial.options[one.name]) for one in space), height]
        for trial, height in zip(trials, heights, strict=True)
    ]
    metric = parse_best(study.request.metric)[0]
    columns: dict[str, list[Any]] = {
        "xs": [list(range(last + 1))] * len(trials),
        "ys": lines,
        "ink": shade,
        "width": [3.0 if trial is study.best else 1.3 for trial in trials],
        "trial": [trial.number for trial in trials],
        "value": values,
        "options": [label(in_words(trial.options), 80) for trial in trials],
    }
    tips = [("trial", "@trial"), (label(metric), "@value{0.0000}"), ("", "@options")]
    plot = blank(height=360, tips=tips, x_range=(-0.35, last + 0.55), y_range=(-0.08, 1.12))
    plot.xaxis.ticker = FixedTicker(ticks=list(range(last + 1)))
    rungs = study.request.rungs
    names = [*(one.name for one in space), f"{metric} by epoch {rungs[0]}" if rungs else metric]
    plot.xaxis.major_label_overrides = dict(enumerate(labels(names, 24)))
    plot.yaxis.visible = False
    plot.grid.grid_line_color = None
    line = MultiLine(xs="xs", ys="ys", line_color="ink", line_width="width", line_alpha=0.85)
    # The last one is drawn over the others.
    drawn = sorted(range(len(trials)), key=lambda at: trials[at] is study.best)
    plot.add_glyph(ColumnDataSource({name: [column[at] for at in drawn] for name, column in columns.items()}), line)
    _axes(plot, space, (low, high))
    caption = "Each line is a trial; the brighter, the better it was by its first rung. The widest is the best of all."
    return Chart(name="coordinates", title="Options", figure=plot, caption=caption, is_wide=True)


def _axes(plot: figure, space: Sequence[Dimension], ends: tuple[float, float]) -> None:
    low, high = ends
    ticks = [(at, y, text) for at, one in enumerate(space) for y, text in _ticks(one)]
    ticks += [(len(space), 0.0, f"{low:.4g}"), (len(space), 1.0, f"{high:.4g}")]
    bars = {"x": list(range(len(space) + 1)), "low": [0.0] * (len(space) + 1), "high": [1.0] * (len(space) + 1)}
    plot.add_glyph(ColumnDataSource(bars), Segment(x0="x", x1="x", y0="low", y1="high", line_color=OTHER))
    words = {
        "x": [x for x, *_ in ticks],
        "y": [y for _, y, _ in ticks],
        "text": [label(text) for *_, text in ticks],
        # Lines meet at the ends of an axis: their labels stand above and below.
        "down": [{0.0: LABEL_OFFSET, 1.0: -LABEL_OFFSET}.get(y, 0) for _, y, _ in ticks],
    }
    plot.add_glyph(
        ColumnDataSource(words),
        Text(
            x="x",
            y="y",
            text="text",
            x_offset=6,
            y_offset="down",
            text_font=constant(FONT),
            text_font_size="12px",
            text_baseline="middle",
            text_color=OTHER,
        ),
    )


def _importance(importances: Mapping[str, float]) -> Chart | None:
    if len(importances) < 2:
        return None
    names = labels(list(importances))
    plot = rows_figure(names, 34, 1.0, [("", "@row"), ("importance", "@part{0 %}")], x="")
    plot.xaxis.formatter = NumeralTickFormatter(format="0 %")
    source = ColumnDataSource({"row": names, "part": list(importances.values())})
    plot.add_glyph(source, HBar(y="row", left=0, right="part", height=0.6, fill_color=colour(0), line_color=colour(0)))
    caption = "How much of the difference between trials at their first rung each option explains, by Optuna."
    return Chart(name="importance", title="Importance", figure=plot, caption=caption)


def _steps(study: Study) -> Chart:
    """The steps of each trial, and those of a whole one."""
    numbers = sorted(study.trials)
    trials = [study.trials[number] for number in numbers]
    inks = [colour(max(0, len(trial.reached) - 1)) for trial in trials]
    columns = {"x": numbers, "steps": [trial.steps for trial in trials], "ink": inks}
    plot = blank(height=320, x="trial", y="steps", tips=[("trial", "@x"), ("steps", "@steps{0,0}")])
    plot.xaxis.ticker = BasicTicker(min_interval=1)
    plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]a")
    plot.y_range = from_zero(max(trial.steps for trial in trials))
    bar = VBar(x="x", bottom=0, top="steps", width=0.7, fill_color="ink", line_color="ink")
    plot.add_glyph(ColumnDataSource(columns), bar)
    whole = study.whole_steps
    saved = f"; whole trials would have taken {whole:,}, so {1 - study.steps / whole:.0%} were saved" if whole else ""
    return Chart(name="steps", title="Steps", figure=plot, caption=f"{study.steps:,} steps of all trials{saved}.")
