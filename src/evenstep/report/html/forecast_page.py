"""The page of a prediction: efficiency over devices, predicted apart from measured, and the parts of each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.report.html.page import FILE, Page, need_bokeh, render, write_text
from evenstep.report.html.tables import OF_PREDICTIONS, Sheet, milliseconds, predicted_sheet
from evenstep.report.prediction import PART_NAMES, Forecast, Prediction

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
    knees = [knee.sentence for knee in found.knees]
    return render(
        Page(
            title=f"{found.task}: predicted",
            about=f"{predicted} predicted, {len(found.rows) - predicted} measured · {found.links}",
            commands=[found.command] if found.command else [],
            charts=_charts(found),
            runs=predicted_sheet(found.rows),
            numbers={"parts": _parts_sheet(found)},
            sheets=[_sending_sheet(found.rows), _epoch_sheet(found.rows)],
            sheets_title="Communication and epochs",
            words=OF_PREDICTIONS,
            notes=[text for text in (found.errors, _joined(knees), _joined([*found.notes, *_left_out(found)])) if text],
        )
    )


def _charts(found: Forecast) -> list[Chart]:
    from evenstep.report.html import forecast_charts

    return forecast_charts.charts_of(found) if found.rows else []


def _joined(parts: Sequence[str]) -> str:
    return " · ".join(parts)


def _left_out(found: Forecast) -> list[str]:
    return [f"{name} is left out: {why}" for name, why in found.left_out.items()]


def _parts_sheet(found: Forecast) -> Sheet:
    names = list(dict.fromkeys(name for row in found.rows for name in row.parts))
    cells = [
        [label, milliseconds(row.step_seconds.middle), *(milliseconds(row.parts.get(name, 0.0)) for name in names)]
        for label, row in zip(found.labels, found.rows, strict=True)
    ]
    columns = ["", "step", *(PART_NAMES.get(name, name) for name in names)]
    return Sheet(title="Parts of a step, in ms", columns=columns, rows=cells)


def _sending_sheet(rows: Sequence[Prediction]) -> Sheet:
    cells = [
        [
            row.label,
            f"{row.buckets:,}",
            milliseconds(row.hidden_seconds + row.parts.get("communication", 0.0)),
            milliseconds(row.hidden_seconds),
            milliseconds(row.parts.get("communication", 0.0)),
            row.algorithm,
        ]
        for row in rows
        if row.buckets
    ]
    columns = ["", "buckets", "sending", "behind backward", "waited for", "by"]
    return Sheet(title="What a step sends, in ms", columns=columns, rows=cells)


def _epoch_sheet(rows: Sequence[Prediction]) -> Sheet:
    """Steps, evaluation, checkpoints and restarts, in seconds; what devices take together, and cost."""
    known = [row for row in rows if row.device_hours is not None]
    names = list(dict.fromkeys(name for row in known for name in row.epoch_parts))
    costs = ["cost"] * any(row.cost is not None for row in known)
    cells = [
        [
            row.label,
            *(_seconds(row.epoch_parts.get(name, 0.0)) for name in names),
            _seconds(row.epoch_seconds or 0.0),
            f"{row.device_hours:.3g}",
            *([f"{row.cost:.3g}" if row.cost is not None else ""] * len(costs)),
        ]
        for row in known
    ]
    columns = ["", *names, "together", "device hours", *costs]
    return Sheet(title="An epoch, in seconds", columns=columns, rows=cells)


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or not value else f"{value:.3g}" if value >= 0.01 else "< 0.01"
