"""Run a function in a few separate processes that may fail, hang or crash without harm to this one."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenstep.distributed.temporary_folders import live_folder
from evenstep.distributed.worker_process import WorkerSpec, begin, end, read_rank, unblock_signals
from evenstep.launcher.failure import cause
from evenstep.launcher.processes import RankLogs, Workers, workers
from evenstep.launcher.rendezvous.rank_assignment import LocalRendezvous
from evenstep.launcher.variables import set_variables
from evenstep.worker.main import report_failure

Settings = Mapping[str, str | None]
"""Environment variables for a trial; None unsets one."""
MAX_CHARACTERS = 300
ENFORCED = re.compile(r"\[(enforce fail at )?/[^]]*\]\s*(ifa != nullptr\. )?")
"""The location in gloo's sources, which is removed from messages."""


@dataclass(frozen=True)
class Job:
    """A function to call in `num` processes of one group; it returns JSON values."""

    function: Callable[..., Mapping[str, Any]]
    arguments: tuple[Any, ...] = ()
    num: int = 2
    seconds: float = 15.0
    """The time limit, after which it counts as hanging."""
    settings: Settings = field(default_factory=dict)
    environments: Sequence[Mapping[str, str]] = ()
    """Variables with which the processes find each other; by default, through a file on this machine."""


@dataclass(frozen=True)
class Ended:
    """How the processes of a job ended."""

    returned: tuple[Mapping[str, Any], ...] = ()
    """What each process returned, if all did."""
    why: str = ""
    """The first cause, if it failed."""
    is_late: bool = False
    """Whether it was killed at its time limit."""

    @property
    def is_well(self) -> bool:
        return not self.why


def try_out(job: Job) -> Ended:
    return try_together([job])[0]


def try_together(jobs: Sequence[Job]) -> list[Ended]:
    """Run several jobs at the same time; no process is left when this returns, or is interrupted."""
    with ExitStack() as stack:
        attempts = [_Attempt(job, stack) for job in jobs]
        # Poll all of them each time: each has its own deadline.
        while [attempt for attempt in attempts if attempt.is_running()]:
            pass
        return [attempt.ended() for attempt in attempts]


class _Attempt:
    """The processes of one job, from their start to their result."""

    def __init__(self, job: Job, stack: ExitStack) -> None:
        self._job = job
        self._folder = stack.enter_context(live_folder())
        self._rendezvous = LocalRendezvous()
        stack.callback(self._rendezvous.close)
        spec = WorkerSpec(logs=str(self._folder), environment={"OMP_NUM_THREADS": "1"})
        specs = [replace(spec, environment=one) for one in job.environments]
        specs = specs or self._rendezvous.next_round(job.num, 1).specs(spec, job.num)
        self._ranks = [int(one.environment["RANK"]) for one in specs]
        logs, more = RankLogs(self._folder, self._ranks[0]), (job.function, job.arguments, dict(job.settings))
        self._workers: Workers = stack.enter_context(workers(perform, specs, logs, more=more))
        self._deadline = time.monotonic() + job.seconds
        self._is_late = self._is_over = False

    def is_running(self) -> bool:
        """Whether it is still running; waits a moment."""
        # Not polled again once it is over: processes killed then would be taken for the cause.
        self._is_over = self._is_over or not self._workers.poll()
        if not self._is_over and time.monotonic() > self._deadline:
            self._is_over = self._is_late = True
            self._workers.kill()
        return not self._is_over

    def ended(self) -> Ended:
        if self._is_late:
            return Ended(why=f"no result within {self._job.seconds:.0f} s", is_late=True)
        failed = self._workers.failed
        if failed:
            return Ended(why=why_failed(self._folder, {self._ranks[local]: code for local, code in failed.items()}))
        files = [self._folder / f"returned-{local}.json" for local in range(self._job.num)]
        if not all(file.exists() for file in files):
            return Ended(why="a process exited with code 0 before it was done")
        return Ended(tuple(json.loads(file.read_text()) for file in files))


def why_failed(logs: Path, failed: Mapping[int, int]) -> str:
    """The first cause in one line: a process's report, or how it ended without one."""
    found = cause(logs, failed, {})
    is_reported = any(logs.glob("rank*.error.json"))
    said = [line for line in found.details if not line.startswith("  ")] if is_reported else []
    return shortened("\n".join(said or [found.headline]))


def shortened(message: str) -> str:
    """torch's error in one line: NCCL puts the reason last, other libraries first."""
    _, _, last = message.partition("Last error:")
    line = (ENFORCED.sub("", last or message).strip() or "no reason given").splitlines()[0]
    return line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 3]}..."


def perform(
    spec: WorkerSpec, function: Callable[..., Mapping[str, Any]], arguments: tuple[Any, ...], given: Settings
) -> None:
    """The main function of one of these processes."""
    begin(spec)
    unblock_signals()
    # Ctrl-C reaches every process of a terminal; only the doctor handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_variables(given)
    _, _, local = read_rank()
    try:
        returned = json.dumps(dict(function(*arguments)))
        Path(spec.logs, f"returned-{local}.json").write_text(returned)
    except BaseException as error:
        report_failure(spec, error)
        end(1)
    end(0)
