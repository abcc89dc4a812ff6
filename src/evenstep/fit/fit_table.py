"""What `evenstep fit` found, and what it prints of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.fit.memory_model import in_words
from evenstep.report.terminal import plain, print_table, size, table_of, without_control

MUCH_FASTER = 0.97
"""A smaller micro-batch counts as faster from this part of the time on."""


@dataclass(frozen=True, kw_only=True)
class TriedCut:
    """A micro-batch that was tried in real processes."""

    micro_batch: int
    accumulate: int
    fits: bool
    forecast_bytes: float | None = None
    measured_bytes: int | None = None
    """The peak of a step; None: a rank ran out of memory."""
    growth_bytes: int | None = None
    """The same, without what the process held before it made the model."""
    evaluation_bytes: int | None = None
    step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What would make more samples fit at once."""

    change: str
    micro_batch: int | None
    """The largest that would fit; None if none would."""
    needs_bytes: float


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """One strategy: its memory by kind, the largest micro-batch that fits and the fastest."""

    strategy: str
    devices: int
    share: int
    """Samples of a step on one device."""
    limit_bytes: float
    """Of each device."""
    micro_batch: int | None
    """The largest that fits; None if not even the smallest does."""
    accumulate: int | None
    kinds: dict[str, float] = field(default_factory=dict)
    """The forecast for it, or for the smallest; empty if nothing could be forecast."""
    process_bytes: float = 0.0
    """Of them, what a process holds before it makes the model."""
    evaluation_bytes: float | None = None
    tried: list[TriedCut] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)
    why_not_tried: str = ""

    @property
    def label(self) -> str:
        return self.strategy if self.devices == 1 else f"{self.strategy} x {self.devices}"

    @property
    def forecast_bytes(self) -> float | None:
        return sum(self.kinds.values()) if self.kinds else None

    @property
    def measured(self) -> TriedCut | None:
        """The try of the largest micro-batch."""
        return next((one for one in self.tried if one.fits and one.micro_batch == self.micro_batch), None)

    @property
    def fastest(self) -> TriedCut | None:
        """Of those that were tried; the largest, unless another is clearly faster."""
        timed = [one for one in self.tried if one.fits and one.step_seconds is not None]
        if not timed or self.measured is None:
            return None
        best = min(timed, key=lambda one: one.step_seconds or 0.0)
        largest = self.measured.step_seconds or 0.0
        return best if (best.step_seconds or 0.0) < MUCH_FASTER * largest else self.measured

    @property
    def error(self) -> float | None:
        """Of the forecast of what the model adds to a process: below 0, it was too low."""
        done = self.measured
        if done is None or not done.growth_bytes or not self.kinds:
            return None
        return (sum(self.kinds.values()) - self.process_bytes) / done.growth_bytes - 1


LEAST_ADDED = 16 * 2**20
"""Bytes of a model below which the process's own memory hides it."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """All rows."""

    task: str
    batch: int
    precision: str
    device: str
    rows: list[FitRow]
    notes: list[str] = field(default_factory=list)


def fit_to_json(found: FitResult) -> dict[str, Any]:
    """All that is known, and what follows from it."""
    rows = [{**asdict(row), **_derived(row)} for row in found.rows]
    return {**asdict(found), "rows": rows}


def _derived(row: FitRow) -> dict[str, Any]:
    fastest = row.fastest
    return {
        "label": row.label,
        "forecast_bytes": row.forecast_bytes,
        "measured_bytes": row.measured.measured_bytes if row.measured is not None else None,
        "error": row.error,
        "fastest_micro_batch": fastest.micro_batch if fastest is not None else None,
    }


def show_fit(found: FitResult, console: Console) -> None:
    """Memory by kind, forecast and measured; then what to choose, and what would help."""
    print_table(_memory_table(found), console)
    console.print()
    tries = _tries_table(found)
    if tries.row_count:
        print_table(tries, console)
        console.print()
    for line in _lines(found):
        console.print(without_control(line), markup=False, soft_wrap=True)


SHORT = {
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "activ.",
    "communication": "comm.",
    "framework": "torch",
}


def _memory_table(found: FitResult) -> Table:
    shown = dict.fromkeys(kind for row in found.rows for kind, value in row.kinds.items() if value >= 2**19)
    table = table_of(
        "MiB a device", "samples", *(SHORT.get(kind, kind) for kind in shown), "forecast", "measured", "error*"
    )
    for row in found.rows:
        total, done, error = row.forecast_bytes, row.measured, row.error
        cut = f"{row.micro_batch} x {row.accumulate}" if row.micro_batch is not None else "-"
        cells = [_mebibytes(row.kinds.get(kind)) for kind in shown]
        measured = _mebibytes(done.measured_bytes if done is not None else None)
        style = "" if row.micro_batch is not None else "red"
        table.add_row(
            Text(plain(row.label), style=style),
            cut,
            *cells,
            _mebibytes(total),
            measured,
            f"{error:+.1%}" if error is not None and not _is_small(row) else "-",
        )
    return table


def _is_small(row: FitRow) -> bool:
    """Whether the model adds so little to a process that an error of it says nothing."""
    return sum(row.kinds.values()) - row.process_bytes < LEAST_ADDED


def _tries_table(found: FitResult) -> Table:
    table = table_of("tried", "samples", "forecast", "measured", "evaluation", "ms/step")
    for row in found.rows:
        for one in row.tried:
            taken = Text(_mebibytes(one.measured_bytes)) if one.measured_bytes else Text("out of memory", style="red")
            seconds = f"{one.step_seconds * 1000:.1f}" if one.step_seconds is not None else "-"
            cells = f"{one.micro_batch} x {one.accumulate}", _mebibytes(one.forecast_bytes)
            table.add_row(plain(row.label), *cells, taken, _mebibytes(one.evaluation_bytes or None), seconds)
    return table


def _mebibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f}"


def _lines(found: FitResult) -> Iterator[str]:
    yield (
        f"samples: of a micro-batch x micro-batches of a step (global batch {found.batch}, {found.precision}, "
        f"{found.device}); * of what the model adds to a process, where that is 16 MiB or more"
    )
    for row in found.rows:
        yield from _about(row)
    yield from found.notes


def _about(row: FitRow) -> Iterator[str]:
    limit = size(int(row.limit_bytes))
    if row.micro_batch is None:
        needs = f" needs {size(int(row.forecast_bytes))} ({in_words(row.kinds)})" if row.forecast_bytes else ""
        yield f"{row.label} does not fit in {limit}: the smallest micro-batch{needs}"
    else:
        fits = f"up to {row.micro_batch} samples at once fit"
        if row.accumulate == 1:
            fits = f"the whole share, {row.micro_batch} samples at once, fits"
        yield f"{row.label}: {fits} in {limit}{_flag(row.accumulate)}"
    best = row.fastest
    if best is not None and best is not row.measured:
        faster = f"{row.label}: {best.micro_batch} samples at once were faster{_flag(best.accumulate)}"
        yield f"{faster}, in one timing of a few steps"
    if row.why_not_tried:
        yield f"{row.label} was not tried: {row.why_not_tried}"
    for one in row.remedies:
        fits = f"{one.micro_batch} samples at once would fit" if one.micro_batch else "would not fit either"
        yield f"{row.label} with {one.change}: {fits} ({size(int(one.needs_bytes))})"


def _flag(accumulate: int | None) -> str:
    return f" (--accumulate {accumulate})" if accumulate is not None and accumulate > 1 else ""
