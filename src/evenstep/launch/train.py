"""Running a prepared plan, in this process or in many, and watching it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import torch

from evenstep.errors import EvenstepError, PlanError
from evenstep.launch.failure import failure, stopped_where
from evenstep.launch.prepare import Prepared, prepare
from evenstep.launch.processes import RankLogs, Workers, python, workers
from evenstep.plan import Plan
from evenstep.record import FILE, Record, rows
from evenstep.report.progress import Progress
from evenstep.seeding import host_state, restore_host_state
from evenstep.task import Task, TaskFunction
from evenstep.worker.job import Event, perform
from evenstep.worker.machine import share_threads
from evenstep.worker.main import WORKER, work_forked, write_report
from evenstep.worker.strategies import STRATEGIES


def train(task: str | TaskFunction | Task, *, progress: bool = True, **choices: Any) -> Record:
    """Train a task and return its Record; the choices are the fields of a Plan, and may be left out.

    record = evenstep.train(task, strategy="ddp", devices=2, batch=512, epochs=10)
    """
    if WORKER in os.environ:
        raise PlanError(
            "evenstep.train was called by a worker that imports your script; let the script alone call it:\n"
            'if __name__ == "__main__": evenstep.train(...)'
        )
    unknown = set(choices) - set(CHOICES)
    if unknown:
        raise PlanError(f"unknown {', '.join(sorted(unknown))}; train takes {', '.join(CHOICES)}")
    with _settings_kept():
        return watch(prepare(task, choices), progress)


def watch(prepared: Prepared, progress: bool) -> Record:
    """Carry the plan out, show how it goes, and read back what it wrote."""
    with Progress(prepared.num_steps, quiet=not progress) as shown:
        try:
            for event in run(prepared):
                shown.show(event)
        except KeyboardInterrupt:
            shown.say(stopped_where(prepared.folder))
            raise
    return Record.read(prepared.folder)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """A training in this process must not change how the user's own torch computes afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    flags = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    tf32 = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    generator, host = torch.get_rng_state(), host_state()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
        torch.set_rng_state(generator)
        restore_host_state(host)


CHOICES = (*(field.name for field in fields(Plan) if field.name != "task"), "plan")


def run(prepared: Prepared) -> Iterator[Event]:
    """Carry the plan out, yielding what happens as it happens."""
    if STRATEGIES[prepared.plan.strategy].processes_per_device:
        return _in_processes(prepared)
    return _in_this_process(prepared)


def _in_this_process(prepared: Prepared) -> Iterator[Event]:
    try:
        yield from perform(prepared.plan, prepared.task, prepared.folder)
    except EvenstepError:
        raise
    except Exception as error:
        write_report(prepared.folder, 0, error)
        raise failure(prepared.folder, {0: 1}, 1) from error


def _in_processes(prepared: Prepared) -> Iterator[Event]:
    plan, folder = prepared.plan, prepared.folder
    entry: Any
    arguments: tuple[Any, ...]
    if prepared.spec is not None:
        entry, arguments = python("-m", "evenstep.worker", str(folder))
        logs = RankLogs(folder / "logs")
    else:
        _refuse_fork_after_cuda()
        entry, arguments = work_forked, (str(folder), prepared.task)
        logs = RankLogs(folder / "logs", open_ranks=range(len(plan.devices)))
    threads = share_threads(plan.threads, plan.devices)
    # Workers find the modules that this process finds: a task may be imported from beside the user's script.
    found_here = os.pathsep.join(dict.fromkeys(str(Path(folder).resolve()) for folder in sys.path))
    environment = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": found_here}
    with workers(entry, arguments, len(plan.devices), logs, environment) as started:
        yield from _watch(started, folder)
        assert started.exit_codes is not None
        if started.exit_codes:
            raise failure(folder, started.exit_codes, len(plan.devices))


def _watch(started: Workers, folder: Path) -> Iterator[Event]:
    """Rank 0's rows and lines as they are written, until all workers have ended."""
    record = _Record(folder / FILE)
    spoken = _Lines(folder / "logs" / "rank0.out")
    working = True
    while working:
        working = started.poll()
        yield from spoken.new()
        yield from record.new()


class _Record:
    """The new rows of a record file that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._record: Record | None = None

    def new(self) -> Iterator[Event]:
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
        for row in rows(self._file) if self._file is not None else ():
            if self._record is None:
                self._record = Record.begin(row)
                continue
            event = self._record.take(row)
            if event is not None:
                yield event


class _Lines:
    """The new lines of a log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> Iterator[str]:
        if not self._path.exists() or self._path.stat().st_size <= self._at:
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        if newline:
            yield from whole.decode(errors="replace").split("\n")


def _refuse_fork_after_cuda() -> None:
    if torch.cuda.is_initialized():
        raise PlanError(
            "this process has used CUDA already, and a process that has cannot be copied for ddp or fsdp.\n"
            "Put the task in a file and pass 'file.py', or restart the notebook and train before touching the card"
        )
