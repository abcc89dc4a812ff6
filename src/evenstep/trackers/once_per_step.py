"""Rows of Records as trackers take them: named values of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import IO, Literal

from evenstep.plan import Plan
from evenstep.record import FILE, Evaluation, LayerStatistics, Record, Row, RunEnd, Start, Step, Summary, rows

Outcome = Literal["done", "stopped", "failed", "killed", "running"]


@dataclass(frozen=True)
class Point:
    """Values of one step; those of a kind come in the order of their steps."""

    kind: Literal["train", "valid", "layers", "final"]
    step: int
    seconds: float
    """Of training and evaluation before it."""
    values: dict[str, float]
    """The last name is in every point of its kind."""


@dataclass(frozen=True)
class Redone:
    """The run continues from a checkpoint: points after `step` come again."""

    step: int


class RowValues:
    """The values of each row."""

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._seconds = 0.0
        self._step = 0

    def redo(self) -> None:
        """Peaks that were already given may be lost with their step."""
        self._peaks = {}

    def of(self, row: Row) -> Point | None:
        """None for a row without values."""
        if isinstance(row, Step):
            self._seconds += row.seconds
            self._step = row.step
            return Point("train", row.step, self._seconds, self._of_step(row))
        if isinstance(row, Evaluation):
            self._seconds += row.seconds
            values = {f"valid/{name}": value for name, value in row.values.items()}
            return Point("valid", row.step, self._seconds, values)
        if isinstance(row, LayerStatistics):
            return Point("layers", row.step, self._seconds, layer_values(row))
        if isinstance(row, Summary):
            return Point("final", self._step, self._seconds, final_values(row))
        return None

    def _of_step(self, step: Step) -> dict[str, float]:
        grown = {name: size for name, size in step.peak_bytes.items() if self._peaks.get(name) != size}
        self._peaks |= grown
        return {
            **{f"peak_bytes/{name}": size for name, size in grown.items()},
            **{f"train/{name}": value for name, value in step.logged.items()},
            **({"train/grad_norm": step.grad_norm} if step.grad_norm is not None else {}),
            "train/lr": step.lr,
            "train/samples_per_second": step.samples / step.seconds,
            "train/input_share": step.input_seconds / step.seconds,
            "train/loss": step.loss,
        }


def layer_values(row: LayerStatistics) -> dict[str, float]:
    """`gradients/0.weight/norm` and the like."""
    kinds = {"parameters": row.parameters, "gradients": row.gradients, "outputs": row.outputs}
    return {
        f"{kind}/{name or 'model'}/{what}": value
        for kind, layers in kinds.items()
        for name, values in layers.items()
        for what, value in vars(values).items()
    }


def final_values(summary: Summary) -> dict[str, float]:
    """By which runs are compared."""
    final = {f"final/valid_{name}": value for name, value in summary.valid.items()}
    if summary.best is not None:
        final[f"final/best_{summary.best.metric}"] = summary.best.value
    if summary.train_loss is not None:
        final["final/train_loss"] = summary.train_loss
    return {**final, "final/samples_per_second": summary.samples_per_second}


class PointReader:
    """Reads the Record of a run that may still write it, after those of the runs that it continues."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._waiting = [folder / FILE for folder in folders]
        self._file: IO[bytes] | None = None
        self._values = RowValues()
        self._has_begun = False
        self.summary: Summary | None = None
        self.end: RunEnd | None = None

    def new(self) -> Iterator[Point | Redone]:
        """What was written since the last call."""
        while self._open():
            assert self._file is not None
            for row in rows(self._file):
                point = self._take(row)
                if point is not None:
                    yield point
            if not self._waiting:
                return
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        """Whether there is a file to read on; an earlier run may have been deleted."""
        while self._file is None and self._waiting:
            if self._waiting[0].is_file():
                self._file = self._waiting.pop(0).open("rb")
            elif len(self._waiting) == 1:
                return False
            else:
                self._waiting.pop(0)
        return self._file is not None

    def _take(self, row: Start | Row) -> Point | Redone | None:
        if isinstance(row, Start):
            is_first, self._has_begun = not self._has_begun, True
            self.summary = self.end = None
            self._values.redo()
            return None if is_first else Redone(row.data.get("step", 0))
        if isinstance(row, Summary):
            self.summary = row
        elif isinstance(row, RunEnd):
            self.end = row
        return self._values.of(row)


class OncePerStep:
    """Points that a tracker lacks which cannot replace any: of a step that was taken again, the first."""

    def __init__(self, last_step: Callable[[str], int]) -> None:
        self._ask = last_step
        """The last step of a name that the tracker has; -1 for none."""
        self._last: dict[str, int] = {}

    def of(self, points: Iterable[Point | Redone]) -> Iterator[Point]:
        for point in points:
            if isinstance(point, Redone) or not point.values:
                continue
            if point.kind not in self._last:
                # Of the last name, which is written last.
                self._last[point.kind] = self._ask([*point.values][-1])
            if point.step > self._last[point.kind]:
                self._last[point.kind] = point.step
                yield point


def whole_history(folders: Sequence[Path]) -> Iterator[tuple[int, dict[str, float]]]:
    """All values of each step, as the Records stand now: of a step that was taken again, the last ones."""
    records = [Record.read(folder) for folder in folders if (folder / FILE).is_file()]
    starts = [record.data.get("step", 0) for record in records]
    values = RowValues()

    def points() -> Iterator[Point]:
        for number, record in enumerate(records):
            last = min(starts[number + 1 :], default=None)
            values.redo()
            kinds: list[Iterable[Step | Evaluation | LayerStatistics]] = [
                record.steps,
                record.evaluations,
                record.statistics,
            ]
            for row in merge(*kinds, key=lambda row: row.step):
                if last is not None and row.step > last:
                    break
                point = values.of(row)
                if point is not None:
                    yield point

    for step, of_step in groupby(points(), key=lambda point: point.step):
        yield step, {name: value for point in of_step for name, value in point.values.items()}


def hyperparameters(plan: Plan) -> dict[str, bool | int | float | str]:
    """The plan and the task's options as plain values; fields that are None are left out."""
    values = {**plan.to_json(), "devices": ", ".join(plan.devices)}
    options = {name: str(value) if isinstance(value, list) else value for name, value in values.pop("options").items()}
    return {name: value for name, value in {**options, **values}.items() if value is not None}


def machine_facts(start: Start) -> dict[str, str]:
    """Versions and hardware, as text.

    >>> machine_facts(Start(plan={}, machine={"torch": "2.13.0", "cards": ["H200", "H200"], "cuda": None}))
    {'torch': '2.13.0', 'cards': 'H200, H200'}
    """
    texts = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in start.machine.items()
        if value is not None
    }
    return {name: text for name, text in texts.items() if text}
