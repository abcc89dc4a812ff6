"""The life of one worker process, from its first line to the report of its end."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenstep.distributed.heartbeat import ENDING, LOADING
from evenstep.distributed.preemption import catch_early_signals
from evenstep.distributed.process import WorkerSpec, begin, end, read_rank
from evenstep.distributed.world import read_heartbeat, spare_folder, stay_in_group
from evenstep.errors import EvenstepError, Preempted, shorten
from evenstep.monitor.known_errors import answer, is_victim, message_of, noted_advice, noted_step
from evenstep.plan import Plan
from evenstep.strategy_facts import StrategyFacts, add_strategy
from evenstep.task import Task, call_task, is_user_code, load_task

Perform = Callable[[Plan, Task, Path], Iterator[object]]
"""What a rank runs: `training.trainer.perform`, or a function like it; texts among its events are printed."""
MAX_LOGGED_CHARS = 10**6
"""Characters of a line of a traceback: a message with a tensor in it can be a hundred times longer."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(WorkerSpec):
    """One rank of a training."""

    plan: Plan
    run_folder: str
    cwd: str | None = None
    """The working folder, if the task has already chosen one."""
    strategies: tuple[StrategyFacts, ...] = ()
    """Custom ones, which the plan may name; the task's file, which adds them, is loaded after the plan."""


def work(spec: TrainingSpec, perform: Perform, source: Task | None = None) -> None:
    """Do this rank's part of a run and end the process; write a report if it fails.

    `perform` is the training, or what is done instead of it; `source` is a task that this fork inherited.
    """
    begin(spec)
    rank, _, _ = read_rank()
    catch_early_signals()
    # Ctrl-C reaches every process of a terminal; only the launcher handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _perform_rank(spec, perform, source)
    except Preempted:
        # A requested stop is not a failure: a report could be taken for the cause of one.
        end(Preempted.exit_code)
    except BaseException as error:
        stay_in_group()
        write_report(Path(spec.logs), rank, error)
        end(error.exit_code if isinstance(error, EvenstepError) else 1)
    end(0)


def _perform_rank(spec: TrainingSpec, perform: Perform, source: Task | None) -> None:
    """Load the task under the plan's seed and run it to the end."""
    from evenstep.sampling.rng import seed_everything

    for row in spec.strategies:
        add_strategy(row)
    plan = replace(spec.plan, resume=spec.resume or spec.plan.resume)
    if spec.cwd is not None:
        os.chdir(spec.cwd)
    read_heartbeat().beat(LOADING)
    seed_everything(plan.seed)
    task = call_task(source) if source is not None else load_task(plan.task, plan.data)
    for event in perform(plan, task, Path(spec.run_folder)):
        if isinstance(event, str):
            print(event, flush=True)
    # A rank that exits with code 0 without this heartbeat called os._exit.
    read_heartbeat().beat(ENDING)


def write_report(logs: Path, rank: int, error: BaseException) -> None:
    """Write what the launcher shows of this failure if it is the first cause."""
    raised = _raised(error)
    frames = traceback.extract_tb(raised.__traceback__)
    own = [frame for frame in frames if is_user_code(frame.filename)]
    report = {
        "rank": rank,
        "nanoseconds": time.time_ns(),
        "type": type(raised).__name__,
        "message": message_of(raised),
        "is_plain": isinstance(error, EvenstepError),
        "is_final": getattr(error, "is_final", False),
        "exit_code": error.exit_code if isinstance(error, EvenstepError) else 1,
        "step": noted_step(error),
        "is_victim": is_victim(error),
        "answer": noted_advice(error) or answer(error),
        "lines": [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in own[-4:]],
    }
    # A full disk may be the error itself; the launcher reads both folders.
    for folder in (logs, spare_folder()):
        with suppress(OSError):
            _write_report(folder, rank, report, error)
            return


def _raised(error: BaseException) -> BaseException:
    """What the user's code raised: Python turns a StopIteration inside a generator into a RuntimeError."""
    cause = error.__cause__
    return cause if isinstance(error, RuntimeError) and isinstance(cause, StopIteration) else error


def _write_report(folder: Path, rank: int, report: dict[str, Any], error: BaseException) -> None:
    path = folder / f"rank{rank}.error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written and renamed: this process may be stopped while it writes.
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps(report))
    beside.replace(path)
    with path.with_name(f"rank{rank}.traceback").open("a") as log:
        log.writelines(shorten(part, MAX_LOGGED_CHARS) for part in traceback.format_exception(error))
