"""Worker processes on this machine, started and stopped by PyTorch's elastic engine."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, start_processes

from evenstep.distributed.temporary_folders import make_socket_folder
from evenstep.distributed.worker_process import WorkerSpec
from evenstep.distributed.world import leave_group_of_one
from evenstep.errors import Preempted
from evenstep.launcher.fork_server import DYING_SECONDS, ensure_resource_tracker, forking, server_exit_code
from evenstep.launcher.variables import changed_variables, token_hidden, with_variables
from evenstep.private_apis import elastic_processes
from evenstep.worker import main as worker_main

POLL_SECONDS = 0.02
KILL_SECONDS = 2
"""How long a killed process may take to disappear."""
REPORT_SECONDS = 0.5
"""How long the other ranks may take to exit when one has failed: their reports show which failed first."""
UNKNOWN = 255
"""The exit code that multiprocessing gives to the children of a dead fork server."""

StartMethod = Literal["server", "fork", "program"]
"""Forked from the fork server, forked from this process, or started as a new program."""


class RankLogs(LogsSpecs):
    """`rank0.out`, `rank0.err`, ... in one folder, from `first_rank` on."""

    def __init__(self, folder: Path, first_rank: int = 0) -> None:
        super().__init__()
        self.folder = folder
        self.first_rank = first_rank
        folder.mkdir(parents=True, exist_ok=True)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        errors = {local: str(self.path(local, "engine.json")) for local in envs}
        for local, path in errors.items():
            envs[local]["TORCHELASTIC_ERROR_FILE"] = path
        # The ranks open their logs themselves: the engine would leak the old descriptors into forks, and cannot
        # redirect a notebook's streams.
        unchanged = dict.fromkeys(envs, "")
        return LogsDest(
            stdouts=unchanged,
            stderrs=unchanged,
            error_files=errors,
            filtered_stdout=os.devnull,
            filtered_stderr=os.devnull,
        )

    def path(self, local: int, ending: str) -> Path:
        return self.folder / f"rank{self.first_rank + local}.{ending}"

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)


class Workers:
    """The processes of one attempt on this machine, and how they ended."""

    def __init__(self, context: PContext, num: int, server: int | None = None) -> None:
        self._context = context
        self._server = server
        self.num = num
        self.pids: dict[int, int] = context.pids()
        self.failed: dict[int, int] = {}
        """Exit codes of the processes that failed, without those that were then killed."""
        self._killed_groups: set[int] = set()

    def poll(self) -> bool:
        """Whether they are still running; waits a moment."""
        if self._failures():
            self.end_others()
            return False
        if len(self.exit_codes()) == self.num:
            return False
        time.sleep(POLL_SECONDS)
        return True

    def end_others(self) -> None:
        """After a failure: give the remaining processes a moment to write reports, then kill them."""
        self._kill_groups(self._failures())
        self._wait_for_reports()
        self.failed = self._failures()
        self._kill_groups(self.failed)
        self.kill()

    def exit_codes(self) -> dict[int, int]:
        return {local: code for local, code in enumerate(_exit_codes(self._context)) if code is not None}

    def running(self) -> dict[int, int]:
        """Process ids of the processes that have not ended; an ended one's id may have been reused."""
        ended = self.exit_codes()
        return {local: pid for local, pid in self.pids.items() if local not in ended}

    def server_exit_code(self) -> int | None:
        """The exit code of the fork server, if its end is why those of its children are unknown."""
        if self._server is None or UNKNOWN not in self.failed.values():
            return None
        return server_exit_code(self._server, DYING_SECONDS)

    def send(self, number: int) -> None:
        for pid in self.running().values():
            send(pid, number)

    def kill(self) -> None:
        """Kill them: a rank that waits in a collective never handles a gentler signal."""
        self._kill_groups(self.running())
        self._context.close(signal.SIGKILL, timeout=KILL_SECONDS)

    def _kill_groups(self, locals_: Iterable[int]) -> None:
        """Kill process groups: a hanging loader worker would outlive its program.

        Once each, since the id of a group that is gone may be reused.
        """
        for local in {*locals_} - self._killed_groups:
            self._killed_groups.add(local)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pids[local], signal.SIGKILL)

    def _failures(self) -> dict[int, int]:
        return {local: code for local, code in self.exit_codes().items() if code not in (0, Preempted.exit_code)}

    def _wait_for_reports(self) -> None:
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline and len(self.exit_codes()) < self.num:
            time.sleep(POLL_SECONDS)


@contextmanager
def workers(
    entry: Callable[..., None],
    specs: Sequence[WorkerSpec],
    logs: RankLogs,
    how: StartMethod = "server",
    more: tuple[Any, ...] = (),
) -> Iterator[Workers]:
    """Start `entry(spec, *more)` in a process for each spec; none is left when the block ends."""
    # The engine logs every process that fails or is killed; the user wants the cause alone.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    make_socket_folder()
    if how == "fork":
        leave_group_of_one()
    # With its own signal handlers, which raise, the engine would replace ours.
    own_signals = changed_variables({"TORCHELASTIC_SIGNALS_TO_HANDLE": ""})
    with forking() if how == "server" else nullcontext() as server, own_signals, token_hidden():
        given = [replace(spec, parent=server or os.getpid()) for spec in specs]
        context = start_processes(
            name="evenstep",
            entrypoint=sys.executable if how == "program" else entry,
            args={
                local: ("-u", "-m", worker_main.__name__, msgspec.json.encode(spec).decode())
                if how == "program"
                else (spec, *more)
                for local, spec in enumerate(given)
            },
            envs={local: with_variables(spec.environment) for local, spec in enumerate(given)},
            logs_specs=logs,
            start_method="forkserver" if how == "server" else "fork",
        )
    started = Workers(context, len(specs), server)
    try:
        yield started
    finally:
        started.kill()
        if server is not None:
            # The tracker is notified when the engine's semaphores are deleted.
            ensure_resource_tracker()


def _exit_codes(context: PContext) -> list[int | None]:
    """Read directly: the engine waits half a minute for the remaining processes, and counts them as failed too."""
    handlers = getattr(context, "subprocess_handlers", None)
    if handlers is not None:
        return [handlers[local].proc.poll() for local in sorted(handlers)]
    return [process.exitcode for process in elastic_processes(context)]


def send(pid: int, number: int) -> None:
    """Send a signal to a process, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def send_to_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread only, where the C library can (Linux)."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None:
        send(pid, number)
    else:
        tgkill(pid, pid, number)


def seconds_computed(pid: int) -> float:
    """CPU time of a process and its descendants."""
    try:
        process = psutil.Process(pid)
        every = [process, *process.children(recursive=True)]
        return sum(sum(one.cpu_times()[:2]) for one in every)
    except psutil.Error:
        return 0.0


IDLE_SHARE = 0.05
"""Of a core: threads that wait in torch wake every few milliseconds, and use about a hundredth."""


class Computed:
    """CPU seconds of processes, of which those count that are more than waiting takes."""

    def __init__(self) -> None:
        self._counted: dict[int, tuple[float, float]] = {}
        """By process: its CPU seconds when they last counted, and when that was."""

    def seconds(self, pid: int) -> float:
        """The same number as before for a process that only waits."""
        now, used = time.monotonic(), seconds_computed(pid)
        counted, since = self._counted.setdefault(pid, (used, now))
        if used - counted > IDLE_SHARE * (now - since):
            self._counted[pid] = used, now
        return self._counted[pid][0]
