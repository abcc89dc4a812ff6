"""A process with torch imported, from which workers are copied: the second that an import takes is spent once.

It is Python's own fork server. It is started before the launcher imports torch itself, so that both imports go on at
the same time, and a run that goes on after a crash finds it still there.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from evenstep.worker.lifeline import LAUNCHER

PRELOADED = ("evenstep.worker.server",)
FOR_FSDP = ("torch.distributed.fsdp", "torch.distributed.device_mesh", "torch.distributed.tensor")
SEVERAL = ("--devices", "--strategy", "--restarts", "--machines", "--resume", "--plan")


def start_server(more: Sequence[str] = ()) -> None:
    """Start the server, or find it running."""
    # Imported here: --help need not wait for it.
    import multiprocessing
    from multiprocessing import forkserver

    multiprocessing.set_forkserver_preload([*PRELOADED, *more])
    _start_tracker()
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        with no_main():
            forkserver.ensure_running()
    finally:
        del os.environ[LAUNCHER]


def _start_tracker() -> None:
    """Python's tracker of semaphores tidies up after killed processes, and would complain of it after our last word."""
    from multiprocessing import resource_tracker

    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore"
    try:
        resource_tracker.ensure_running()
    finally:
        del os.environ["PYTHONWARNINGS"]
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


def start_server_for(arguments: Sequence[str]) -> None:
    """Start the server if a command line looks as if processes will be started; if it errs, little is lost."""
    command, *rest = [*arguments, ""]
    names = [word.partition("=")[0] for word in rest]
    if "--help" in names or not hasattr(os, "fork") or sys.platform != "linux":
        return
    if "--machines" in names or "SLURM_STEP_ID" in os.environ:
        # Read when torch is loaded: without it, c10d says in every process that names cannot be looked up.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if command in ("verify", "compare"):
        start_server(FOR_FSDP)
    is_spread = command == "train" and ("SLURM_STEP_ID" in os.environ or any(name in SEVERAL for name in names))
    if is_spread or (command == "run" and "--fresh" not in names):
        start_server(FOR_FSDP if "fsdp" in " ".join(rest) else ())


def server_process() -> int:
    """The server's process id: the parent of every worker that is copied from it."""
    from multiprocessing import forkserver

    start_server()
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


@contextmanager
def no_main() -> Iterator[None]:
    """Hide the program that is running: multiprocessing would run it again in every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
