"""A fork server with torch imported, so that the second that the import takes is spent once.

It is Python's own fork server, started before the launcher imports torch itself, so that both imports overlap; it
survives a crash of the workers, and a restart uses it again.
"""

from __future__ import annotations

import os
import sys
import time
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from evenstep.distributed.huge_pages import huge_pages_later
from evenstep.distributed.temporary_folders import make_socket_folder
from evenstep.distributed.worker_process import signal_name
from evenstep.errors import WorkerFailed
from evenstep.launcher.variables import (
    changed_variables,
    launcher_variables,
    set_variables,
    threads_for_script,
    token_hidden,
)
from evenstep.private_apis import fork_server_pid, has_resource_tracker
from evenstep.strategy_facts import STRATEGIES

DYING_SECONDS = 1.0
"""How long after its pipes close a killed process may take to be reported as dead."""
MULTI_PROCESS_OPTIONS = ("--devices", "--strategy", "--restarts", "--machines", "--resume", "--plan", "--config")
DEVICES = ("--devices", "--nproc-per-node", "--nproc_per_node")
NO_VALUE = ("-m", "--module", "--fresh", "--standalone")
"""Options of `run` that no value follows."""


def start_server(more: Sequence[str] = ()) -> None:
    """Start the server unless it is running."""
    # Imported here, to keep --help fast.
    import multiprocessing
    from multiprocessing import forkserver

    make_socket_folder()
    multiprocessing.set_forkserver_preload(["evenstep.worker.preload", *more])
    ensure_resource_tracker()
    with token_hidden(), hidden_main(), huge_pages_later() as variables, changed_variables(variables):
        forkserver.ensure_running()


def ensure_resource_tracker(starts: bool = True) -> None:
    """Start multiprocessing's resource tracker, or replace one that was killed; without `starts`, only replace.

    It cleans up after killed processes, and would print warnings about that after our last line; one that replaces
    another also prints a traceback for every semaphore that the first one knew.
    """
    if not starts and "multiprocessing.resource_tracker" not in sys.modules:
        return
    if not starts and not has_resource_tracker():
        return
    from multiprocessing import resource_tracker

    warnings.filterwarnings("ignore", "resource_tracker: process died unexpectedly")
    with changed_variables({"PYTHONWARNINGS": "ignore"}), _stderr_closed():
        resource_tracker.ensure_running()


@contextmanager
def _stderr_closed() -> Iterator[None]:
    """Processes started inside the block inherit a stderr that goes nowhere."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def start_server_for(arguments: Sequence[str]) -> None:
    """Start the server if a command line suggests that processes will be started; a wrong guess costs little."""
    command, *rest = [*arguments, ""]
    names = [word.partition("=")[0] for word in rest]
    if "--help" in names or not hasattr(os, "fork") or sys.platform != "linux":
        return
    given = launcher_variables()
    is_cluster = bool(given.SLURM_STEP_ID or given.PET_NNODES)
    if "--machines" in names or is_cluster:
        # Read when torch is loaded: without it, c10d warns in every process that names cannot be looked up.
        set_variables({"TORCH_CPP_LOG_LEVEL": given.TORCH_CPP_LOG_LEVEL})
    if command in ("verify", "compare"):
        start_server(_preloads(STRATEGIES))
    has_several = is_cluster or any(name in MULTI_PROCESS_OPTIONS for name in names)
    if command == "run":
        # In this process too: OpenMP, MKL and OpenBLAS read it once, when the server loads them.
        set_variables(threads_for_script(_num_processes(rest)))
    if command == "tune" and "--show" not in names:
        start_server()
    if (command == "train" and has_several) or (command == "run" and "--fresh" not in names):
        start_server(_preloads(name for name in STRATEGIES if name in " ".join(rest)))


def _preloads(names: Iterable[str]) -> list[str]:
    """What workers of these strategies import."""
    return [module for name in names for module in STRATEGIES[name].preloads]


def _num_processes(words: Sequence[str]) -> int:
    """The value of `--devices` before the script; 1 if there is none."""
    before = ""
    for word in words:
        name, _, value = word.partition("=")
        if before in DEVICES:
            name, value = before, word
        elif not word.startswith("-") and (not before.startswith("--") or before in NO_VALUE):
            return 1
        if name in DEVICES and value:
            # Longer ones are refused later, with a message; int() would raise here.
            return int(value) if value.isdecimal() and len(value) < 10 else 1
        before = word
    return 1


@contextmanager
def forking() -> Iterator[int]:
    """The server's process id, while workers are forked from it; if that fails, none of them is left."""
    import multiprocessing

    start_server()
    pid, before = fork_server_pid(), multiprocessing.active_children()
    try:
        with hidden_main():
            yield pid
        if fork_server_pid() != pid:
            # multiprocessing has started another server, whose children would not know their parent.
            raise EOFError
    except (OSError, EOFError, multiprocessing.ProcessError) as error:
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()
        raise WorkerFailed(_why_not_copied(pid, error)) from error


def _why_not_copied(pid: int, error: Exception) -> str:
    if fork_server_pid() != pid:
        return server_lost(None)
    exit_code = server_exit_code(pid, DYING_SECONDS)
    return f"the ranks could not be started: {error}" if exit_code is None else server_lost(exit_code)


def server_exit_code(pid: int, seconds: float) -> int | None:
    """The exit code of a server, as subprocess gives it; None if it does not end within these seconds.

    It is not reaped: multiprocessing starts another server when it finds this one dead.
    """
    deadline = time.monotonic() + seconds
    while hasattr(os, "waitid"):
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None  # it was reaped elsewhere
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return None


def server_lost(exit_code: int | None) -> str:
    """The message about a server that ended; its exit code is not always known."""
    how = "has ended" if exit_code is None else f"ended with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f"was ended by {signal_name(-exit_code)}"
    return f"the fork server, from which all ranks are forked, {how}"


@contextmanager
def hidden_main() -> Iterator[None]:
    """Hide the running program, which multiprocessing would run again in every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
