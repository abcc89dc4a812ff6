"""The life of one worker process, from its first line to the report of its end."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from evenstep.errors import EvenstepError
from evenstep.plan import Plan
from evenstep.task import Task, call_task, is_users, load_task
from evenstep.worker.world import PARENT, die_with_parent, read_rank, stay_in_group

WORKER = "EVENSTEP_WORKER"
"""Set in every worker, so that a script that it imports cannot start a training of its own."""


def work_forked(run_folder: str, task: Task) -> None:
    """`work` in a copy of the launcher's own process; its streams (a notebook's, say) are left to the launcher."""
    rank, _, _ = read_rank()
    for number, name in ((1, "out"), (2, "err")):
        log = open(Path(run_folder, "logs", f"rank{rank}.{name}"), "w", buffering=1)  # noqa: SIM115
        os.dup2(log.fileno(), number)
        setattr(sys, f"std{name}", log)
    work(run_folder, task)


def work(run_folder: str, source: Task | None = None) -> None:
    """Do this rank's part of the run in `run_folder`; leave a report there if it fails."""
    rank, _, _ = read_rank()
    os.environ[WORKER] = str(rank)
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        os._exit(1)  # the launcher was gone before this process could ask to go with it
    die_with_parent()
    # Ctrl-C reaches every process of a terminal; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        perform_rank(Path(run_folder), source)
    except BaseException as error:
        stay_in_group()
        write_report(Path(run_folder), rank, error)
        end(error.exit_code if isinstance(error, EvenstepError) else 1)


def end(exit_code: int) -> None:
    """End this process at once.

    Taking the interpreter apart in order would wait for ranks that wait for this one.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def perform_rank(run_folder: Path, source: Task | None) -> None:
    """Load the task under the plan's seed and run it to the end."""
    from evenstep.seeding import seed_everything
    from evenstep.worker.job import perform

    plan = Plan.from_json(json.loads((run_folder / "plan.json").read_text()))
    seed_everything(plan.seed)
    task = call_task(source) if source is not None else load_task(plan.task, plan.data)
    for event in perform(plan, task, run_folder):
        if isinstance(event, str):
            print(event, flush=True)


def write_report(run_folder: Path, rank: int, error: BaseException) -> None:
    """What the launcher shows of this failure, if it is the first cause."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)]
    report = {
        "rank": rank,
        "nanoseconds": time.time_ns(),
        "type": type(error).__name__,
        "message": str(error),
        "is_plain": isinstance(error, EvenstepError),
        "exit_code": error.exit_code if isinstance(error, EvenstepError) else 1,
        "where": getattr(error, "__notes__", []),
        "lines": [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in own[-4:]],
    }
    path = run_folder / "logs" / f"rank{rank}.error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside and renamed: this process may be stopped while it writes.
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps(report))
    beside.replace(path)
    with path.with_name(f"rank{rank}.err").open("a") as log:
        traceback.print_exception(error, file=log)
