"""Worker processes on this machine, started and stopped by PyTorch's elastic engine."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, SignalException, start_processes

from evenstep.worker.world import PARENT, STORE

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 2
"""How long a worker that was asked to end may take before it is killed."""


class RankLogs(LogsSpecs):
    """`rank0.out`, `rank0.err`, ... in one folder; ranks in `open_ranks` keep the launcher's own streams."""

    def __init__(self, folder: Path, open_ranks: Sequence[int] = ()) -> None:
        super().__init__()
        self.folder = folder
        self._open_ranks = open_ranks
        folder.mkdir(parents=True, exist_ok=True)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        def paths(ending: str) -> dict[int, str]:
            return {
                rank: "" if rank in self._open_ranks else str(self.folder / f"rank{rank}.{ending}") for rank in envs
            }

        return LogsDest(
            stdouts=paths("out"),
            stderrs=paths("err"),
            error_files={rank: str(self.folder / f"rank{rank}.engine.json") for rank in envs},
            filtered_stdout=os.devnull,
            filtered_stderr=os.devnull,
        )

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)


class Workers:
    """The processes of one run, and how they ended."""

    def __init__(self, context: PContext) -> None:
        self._context = context
        self.exit_codes: dict[int, int] | None = None
        """Of the ranks that failed, once all have ended; empty if none did."""

    def poll(self) -> bool:
        """Whether they are still at work; waits a moment."""
        failed = self._ended_badly()
        if failed:
            # Before the engine sees it: that one waits half a minute for the others, and counts them as failed too.
            self._context.close(signal.SIGTERM, timeout=PATIENCE_SECONDS)
            self.exit_codes = failed
            return False
        result = self._context.wait(timeout=0)
        if result is None:
            time.sleep(POLL_SECONDS)
            return True
        self.exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        return False

    def _ended_badly(self) -> dict[int, int]:
        handlers = getattr(self._context, "subprocess_handlers", {})
        codes = {rank: handler.proc.poll() for rank, handler in handlers.items()}
        return {rank: code for rank, code in codes.items() if code}


@contextmanager
def workers(
    entry: str | Callable[..., None],
    arguments: tuple[Any, ...],
    num_workers: int,
    logs: RankLogs,
    environment: Mapping[str, str],
) -> Iterator[Workers]:
    """Start `entry` (a program, or a function to fork) as ranks 0 to n - 1; none is left when the block ends."""
    meeting = Path(tempfile.mkdtemp(prefix="evenstep-"))  # mode 0700: nobody else can meet here
    # The engine logs every process that fails or is ended; the reader wants the cause alone.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    context: PContext | None = None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        context = start_processes(
            name="evenstep",
            entrypoint=entry,
            args=dict.fromkeys(range(num_workers), arguments),
            envs={
                rank: {**_rank_environment(rank, num_workers), STORE: str(meeting / "store"), **environment}
                for rank in range(num_workers)
            },
            logs_specs=logs,
            start_method="fork",
        )
        yield Workers(context)
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    finally:
        if context is not None:
            _close(context)
        shutil.rmtree(meeting, ignore_errors=True)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _close(context: PContext) -> None:
    context.close(signal.SIGTERM, timeout=PATIENCE_SECONDS)
    for handler in getattr(context, "subprocess_handlers", {}).values():
        # torch leaves the logs of processes that ended by themselves open.
        for stream in (handler._stdout, handler._stderr):
            if stream is not None:
                stream.close()


def _rank_environment(rank: int, size: int) -> dict[str, str]:
    """What torchrun would set, less the address: processes of one machine meet through a file."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, PARENT: os.getpid()}
    return {name: str(value) for name, value in names.items()}


def python(*arguments: str) -> tuple[str, tuple[str, ...]]:
    """This very Python, as a program and its arguments."""
    return sys.executable, ("-u", *arguments)
