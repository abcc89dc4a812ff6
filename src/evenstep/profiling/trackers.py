"""`--log tensorboard`: rank 0's numbers, where other programs show them. One that fails never stops a training."""

from __future__ import annotations

import importlib.util
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from evenstep.errors import PlanError
from evenstep.plan import Plan
from evenstep.record import Evaluation, Row, Step, Summary

FOLDER = "tensorboard"
MOST_WAITING = 10_000
"""Rows that may wait to be written; a disk that is further behind than that is given up."""
CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Beginning:
    """What a tracker is told before the first row."""

    plan: Plan
    run_folder: Path
    redone_from: int | None = None
    """The first step that is taken again, in a run that goes on in its own folder: what was told of it is void."""


class Tracker(Protocol):
    """Somewhere else to look at a run. Neither method waits for a disk or a network."""

    def take(self, row: Row) -> None:
        """Tell of one row of the Record."""

    def close(self) -> None:
        """Write what is left; raises what went wrong."""


def check_log(name: str | None) -> None:
    """Refuse a tracker that is not installed, before anything is started."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise PlanError(f"--log {name} needs {name}, which is not installed here; pip install 'evenstep[{name}]'")


class Tracking:
    """A tracker, until it fails: then that is said once, and it is off."""

    def __init__(self, beginning: Beginning) -> None:
        self._name = str(beginning.plan.log)
        self._tracker: Tracker | None = None
        self._said = self._try(lambda: self._start(beginning))

    def take(self, row: Row) -> Iterator[str]:
        """Pass a row on; what there is to say."""
        said, self._said = self._said, []
        yield from said
        if self._tracker is not None:
            yield from self._try(lambda: self._pass_on(row))

    def close(self) -> None:
        """In good times the last row was a Summary, and nothing is left to be written."""
        self._try(self._end)

    def _start(self, beginning: Beginning) -> None:
        self._tracker = TRACKERS[self._name](beginning)

    def _pass_on(self, row: Row) -> None:
        assert self._tracker is not None
        self._tracker.take(row)
        if isinstance(row, Summary):
            self._end()

    def _end(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close()

    def _try(self, what: Callable[[], None]) -> list[str]:
        try:
            what()
        # Whatever it is, it is not the training's.
        except Exception as error:
            with suppress(Exception):
                self._end()
            return [f"warning: {self._name} is off ({type(error).__name__}: {error}); the training goes on"]
        return []


def start_tracking(beginning: Beginning, is_main: bool) -> Tracking | None:
    """As the plan says, on rank 0 alone."""
    return Tracking(beginning) if is_main and beginning.plan.log is not None else None


class TensorBoard:
    """One run in TensorBoard: the plan as hyperparameters, and a file of events.

    Its own writer ends a thread with a traceback on the screen where a disk is full; this one keeps the error.
    """

    def __init__(self, beginning: Beginning) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.hparams import summary_v2

        folder = beginning.run_folder / FOLDER
        folder.mkdir(exist_ok=True)
        # Files are read in the order of their names.
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{platform.node()}"
        self._events = EventFile(self._path)
        self._peaks: dict[str, int] = {}
        self._last_step = (beginning.redone_from or 1) - 1
        self._chosen = hyperparameters(beginning.plan)
        self._add(file_version="brain.Event:2")
        if beginning.redone_from is not None:
            self._add(step=beginning.redone_from, session_log=SessionLog(status=SessionLog.START))
        self._add(summary=summary_v2.hparams_pb(self._chosen, trial_id=beginning.plan.name))

    def take(self, row: Row) -> None:
        if isinstance(row, Step):
            self._scalars(row.step, self._of_step(row))
        elif isinstance(row, Evaluation):
            self._check_file()
            self._scalars(row.step, {f"valid/{name}": value for name, value in row.values.items()})
        elif isinstance(row, Summary):
            self._check_file()
            self._sum_up(row)

    def close(self) -> None:
        self._events.close()

    def _of_step(self, step: Step) -> dict[str, float]:
        grown = {name: size for name, size in step.peak_bytes.items() if self._peaks.get(name) != size}
        self._peaks |= grown
        self._last_step = step.step
        return {
            "train/loss": step.loss,
            "train/lr": step.lr,
            "train/samples_per_second": step.samples / step.seconds,
            "train/input_share": step.input_seconds / step.seconds,
            **{f"peak_bytes/{name}": size for name, size in grown.items()},
        }

    def _sum_up(self, summary: Summary) -> None:
        """The last values, as what the HPARAMS page compares runs by."""
        from tensorboard.plugins.hparams import summary_v2

        final = {f"final/valid_{name}": value for name, value in summary.valid.items()}
        if summary.train_loss is not None:
            final["final/train_loss"] = summary.train_loss
        final["final/samples_per_second"] = summary.samples_per_second
        metrics = [summary_v2.Metric(name) for name in final]
        self._add(summary=summary_v2.hparams_config_pb([summary_v2.HParam(name) for name in self._chosen], metrics))
        self._scalars(self._last_step, final)

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        """All of them in one event: a step costs one, and that is made by the thread that writes it."""
        self._events.add(partial(_scalars, time.time(), step, values))

    def _add(self, **what: Any) -> None:
        self._events.add(partial(_event, wall_time=time.time(), **what))

    def _check_file(self) -> None:
        if not self._path.exists():
            raise FileNotFoundError(f"{self._path} is gone")


TRACKERS: dict[str, Callable[[Beginning], Tracker]] = {"tensorboard": TensorBoard}


def _scalars(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    from tensorboard.compat.proto.summary_pb2 import Summary as Values

    listed = [Values.Value(tag=name, simple_value=value) for name, value in values.items()]
    return _event(wall_time=wall_time, step=step, summary=Values(value=listed))


def _event(**what: Any) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event

    packed: bytes = Event(**what).SerializeToString()
    return packed


class EventFile:
    """Events on their way to a file; a thread of its own makes and writes them."""

    def __init__(self, path: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._file = path.open("wb")
        self._writer = RecordWriter(self._file)
        self._waiting: queue.SimpleQueue[Callable[[], bytes] | None] = queue.SimpleQueue()
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._thread.start()

    def add(self, event: Callable[[], bytes]) -> None:
        """Have it written; raises what went wrong with those before."""
        if self._problem is not None:
            raise self._problem
        if self._waiting.qsize() > MOST_WAITING:
            raise TimeoutError(f"{MOST_WAITING:,} events wait to be written to {self._file.name}")
        self._waiting.put(event)

    def close(self) -> None:
        """Wait until all of it is written, but not for ever."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._problem is None and self._thread.is_alive():
            self._problem = TimeoutError(f"{self._file.name} takes no more than this in {CLOSE_SECONDS:.0f} s")
        if self._problem is not None:
            raise self._problem

    def _write(self) -> None:
        try:
            with self._file:
                while (event := self._waiting.get()) is not None:
                    self._writer.write(event())
                    if self._waiting.empty():
                        self._file.flush()
        except Exception as error:
            self._problem = error


def hyperparameters(plan: Plan) -> dict[str, bool | int | float | str]:
    """The plan as values that TensorBoard takes; what was left open is left out."""
    values = {**plan.to_json(), "devices": ", ".join(plan.devices)}
    return {name: value for name, value in values.items() if value is not None}
