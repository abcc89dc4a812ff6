"""The life of a process that the launcher started: tied to it, found by its name, ended at once. Imports no torch."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evenstep.errors import BadInput
from evenstep.schema import Natural, Positive, read_variables
from evenstep.worker.interpreter import open_output
from evenstep.worker.stacks import leave_stacks

OWN_LOGS = "EVENSTEP_OWN_LOGS"
"""Set for a copy of another process, which opens its logs itself."""
LAUNCHER = "EVENSTEP_LAUNCHER"
"""Set while the launcher starts its fork server: whose death is to be the server's."""
HELD_BACK = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that the fork server keeps for its copies until they have said what they mean."""
PARENT = "EVENSTEP_PARENT"
"""The process id of whoever started a worker: the launcher, or its fork server."""


@dataclass(frozen=True)
class RankVariables:
    """What torchrun and our launcher tell a process; a process alone has none of it."""

    RANK: Natural = 0
    WORLD_SIZE: Positive = 1
    LOCAL_RANK: Natural = 0
    LOCAL_WORLD_SIZE: Positive | None = None


def read_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """(rank, size, local rank) of this process; (0, 1, 0) for a process alone."""
    given = read_variables(RankVariables, environment)
    if given.RANK >= given.WORLD_SIZE:
        raise BadInput(
            f"the variable RANK is {given.RANK} and WORLD_SIZE is {given.WORLD_SIZE}: ranks go from 0 to "
            f"{given.WORLD_SIZE - 1}; unset both, or start this with evenstep run or torchrun"
        )
    return given.RANK, given.WORLD_SIZE, given.LOCAL_RANK


def asked_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """What OMP_NUM_THREADS says; None where it says nothing, or a list for nested regions, which torch does not use."""
    asked = environment.get("OMP_NUM_THREADS", "")
    return int(asked) or None if re.fullmatch("[0-9]{1,5}", asked) else None


def begin(logs: str) -> None:
    """Tie this process to the launcher, name it, and have it leave its stacks when it is asked for them."""
    # Taken out: what the user's code starts has another parent.
    parent = os.environ.pop(PARENT, None)
    if parent:
        end_with(int(parent))
    take_threads()
    # What a copied process has registered is its original's to do: removing temporary folders, say.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, _, _ = read_rank()
    call_process(f"evenstep-rank{rank}")
    leave_stacks(Path(logs), rank)
    if os.environ.pop(OWN_LOGS, None):
        for stream, name in ((1, "out"), (2, "err")):
            file = os.open(Path(logs) / f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, stream)
            os.close(file)
    open_output()


def take_threads() -> None:
    """Compute with as many threads as OMP_NUM_THREADS says: it may have been set after torch was imported."""
    torch, num = sys.modules.get("torch"), asked_threads()
    if torch is not None and num not in (None, torch.get_num_threads()):
        torch.set_num_threads(num)


def take_signals() -> None:
    """Let signals come that were held back until now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)


def end(exit_code: int) -> None:
    """End this process at once.

    Taking the interpreter apart in order would wait for ranks that wait for this one.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def end_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, however it dies; elsewhere, see that it is still there."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it was gone before this process could ask to go with it


def signal_name(number: int) -> str:
    """`SIGKILL`; of a signal that Python has no name for, its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def call_process(name: str) -> None:
    """The name that `top` and `ps` show; up to 15 letters."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(15, name.encode())  # 15: PR_SET_NAME
