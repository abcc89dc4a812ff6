"""The page of a prediction: efficiency over devices, predicted apart from measured, and the parts of each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.report.html.page import FILE, Page, need_bokeh, render, write_text
from evenstep.report.html.tables import Sheet, milliseconds
from evenstep.report.prediction import Forecast, Prediction

if TYPE_CHECKING:
    from evenstep.report.html.charts import Chart


def write_forecast_page(found: Forecast, folder: Path, path: Path | None = None) -> Path:
    """Write it into the folder of the prediction, or to `path`; returns where."""
    target = path or folder / FILE
    write_text(target, forecast_page(found))
    return target


def forecast_page(found: Forecast) -> str:
    need_bokeh()
    predicted = sum(not row.is_measured for row in found.rows)
    return render(
        Page(
            title=f"{found.task}: predicted",
            about=f"{predicted} predicted, {len(found.rows) - predicted} measured · {found.links}",
            commands=[found.command] if found.command else [],
            charts=_charts(found),
            runs=_rows_sheet(found.rows),
            sheets=[_parts_sheet(found.rows)],
            notes=[found.errors, *(knee.sentence for knee in found.knees), *found.notes, *_left_out(found)],
        )
    )


def _charts(found: Forecast) -> list[Chart]:
    from evenstep.report.html import forecast_charts

    return forecast_charts.charts_of(found) if found.rows else []


def _left_out(found: Forecast) -> list[str]:
    return [f"{name} is left out: {why}" for name, why in found.left_out.items()]


def _rows_sheet(rows: Sequence[Prediction]) -> Sheet:
    columns = [
        "",
        "",
        "machines",
        "batch",
        "samples/s",
        "90 % interval",
        "efficiency",
        "limit",
        "device hours an epoch",
    ]
    return Sheet(
        title="Measured and predicted",
        columns=columns,
        rows=[
            [
                row.label,
                "measured" if row.is_measured else "predicted",
                f"{row.machines:,}",
                f"{row.batch:,.0f}",
                f"{row.samples_per_second.middle:,.0f}",
                f"{row.samples_per_second.low:,.0f} to {row.samples_per_second.high:,.0f}",
                f"{row.efficiency:.0%}",
                row.limit,
                f"{row.device_hours:.3g}" if row.device_hours is not None else "",
            ]
            for row in rows
        ],
    )


def _parts_sheet(rows: Sequence[Prediction]) -> Sheet:
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    cells = [
        [row.label + " (measured)" * row.is_measured, milliseconds(row.step_seconds.middle)]
        + [milliseconds(row.parts.get(name, 0.0)) for name in names]
        for row in rows
    ]
    return Sheet(title="Parts of a step, in ms", columns=["", "step", *names], rows=cells)
