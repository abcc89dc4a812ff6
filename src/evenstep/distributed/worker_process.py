"""The life of a worker process: tied to the launcher, named, with stack dumps on a signal, ended at once. No torch.

Also what makes a fork of the fork server look to a script as if Python had just been started.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import io
import logging
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import IO, Annotated, TextIO

from msgspec import Meta

from evenstep.errors import BadInput
from evenstep.private_apis import become_main_process, close_multiprocessing, forget_exit_handlers, run_exit_handlers
from evenstep.typed_values import Natural, Positive, read_variables

STACKS_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (8 if hasattr(signal, "SIGRTMIN") else 0)
"""A real-time signal that other programs hardly use."""
_open_files: list[IO[str]] = []


@contextmanager
def dump_stacks_to(path: Path) -> Iterator[None]:
    """Dump stacks there on STACKS_SIGNAL inside the block; forks of this process do so, too."""
    with path.open("a") as file:
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS_SIGNAL)


def install_stack_dumps(folder: Path, rank: int) -> None:
    """Dump stacks on STACKS_SIGNAL, and on a fatal signal such as SIGSEGV."""
    requested = (folder / f"rank{rank}.stacks").open("a")
    crashed = (folder / f"rank{rank}.crash").open("a")
    faulthandler.register(STACKS_SIGNAL, file=requested, all_threads=True)
    # All threads: one of gloo's C++ threads may abort the process while the main one waits in the user's line.
    faulthandler.enable(file=crashed, all_threads=True)
    # Kept open: faulthandler has only their descriptors.
    _open_files.extend([requested, crashed])


def detach_from_server() -> None:
    """Detach from the fork server, whose children are not main processes, use it for their own, and hold its pipes."""
    if multiprocessing.parent_process() is None:
        return
    # Only frames of the engine that never run again refer to these.
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2:
            with suppress(OSError):
                os.close(descriptor)
    become_main_process()
    sys.stdin = sys.__stdin__ = _opened_stdin()  # type: ignore[assignment, misc]
    _seed_again()


def _seed_again() -> None:
    """Reseed NumPy and torch, as Python does for `random`: otherwise every fork would draw the same numbers."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _opened_stdin() -> TextIO | None:
    first = sys.__stdin__
    if first is None:
        return None
    stdin = open(0, encoding=first.encoding, errors=first.errors, closefd=False)  # noqa: SIM115
    stdin.buffer.raw.name = "<stdin>"  # type: ignore[attr-defined]
    return stdin


def open_output() -> None:
    """Reopen stdout and stderr unbuffered, as torchrun's `python -u`; a notebook's streams are not files."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        first = getattr(sys, f"__{name}__")
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        raw.name = f"<{name}>"
        encoding, errors = (first.encoding, first.errors) if first is not None else ("utf-8", "backslashreplace")
        stream = io.TextIOWrapper(raw, encoding, errors, newline="\n", write_through=True)
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def new_main(path: str) -> ModuleType:
    """An empty `__main__` for the script at this path, with the attributes that pickle and multiprocessing use."""
    main = ModuleType("__main__")
    whole = os.path.abspath(path)
    builtins = sys.modules["builtins"]
    found = {"__file__": whole, "__loader__": SourceFileLoader("__main__", whole), "__builtins__": builtins}
    vars(main).update(found, __cached__=None, __annotations__={})
    # `__mp_main__` is its name in a spawned child.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def tidy_up_at_exit() -> None:
    """Register multiprocessing's and logging's exit handlers first, so that they run after the script's own."""
    atexit.register(logging.shutdown)
    atexit.register(close_multiprocessing)


BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that the fork server blocks, until its forks have installed their handlers."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything that a launcher gives one worker process; each kind of worker adds what it runs."""

    logs: str = ""
    """The folder for what this attempt's processes print and report."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Its variables: its rank under torchrun's names, and what torch and the user's code read."""
    heartbeats: str = ""
    """The file to which all processes of the attempt write their heartbeats."""
    slot: int = 0
    """This process's slot in it."""
    store: str | None = None
    """The file of the store in which the ranks of one machine meet; None: at MASTER_ADDR."""
    resume: str | None = None
    """The checkpoint from which this attempt continues; None for the plan's."""
    parent: int = 0
    """The process that it dies with: the launcher, or its fork server."""


_spec: WorkerSpec | None = None


def set_spec(spec: WorkerSpec | None) -> None:
    """Make this process a worker with this spec; None: no worker."""
    global _spec
    _spec = spec


def worker_spec() -> WorkerSpec | None:
    """What this process was given; None if no launcher started it."""
    return _spec


@dataclass(frozen=True)
class RankVariables:
    """The rank variables that torchrun and our launcher set; defaults are those of a single process."""

    RANK: Natural = 0
    WORLD_SIZE: Positive = 1
    LOCAL_RANK: Natural = 0
    LOCAL_WORLD_SIZE: Positive | None = None


def read_local_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of processes on this machine, if it is given."""
    return read_variables(RankVariables, environment).LOCAL_WORLD_SIZE


def read_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """(rank, size, local rank) of this process; (0, 1, 0) for a single process."""
    given = read_variables(RankVariables, environment)
    if given.RANK >= given.WORLD_SIZE:
        raise BadInput(
            f"the variable RANK is {given.RANK} and WORLD_SIZE is {given.WORLD_SIZE}: ranks go from 0 to "
            f"{given.WORLD_SIZE - 1}; unset both, or start this with evenstep run or torchrun"
        )
    return given.RANK, given.WORLD_SIZE, given.LOCAL_RANK


@dataclass(frozen=True)
class MasterVariables:
    """Where ranks that no launcher of ours has given a store meet."""

    MASTER_ADDR: str = ""
    MASTER_PORT: Annotated[int, Meta(ge=0, le=65535)] | None = None


def check_master(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse ranks that do not know where they meet."""
    given = read_variables(MasterVariables, environment)
    if not given.MASTER_ADDR or given.MASTER_PORT is None:
        raise BadInput(
            f"WORLD_SIZE is {size}, and MASTER_ADDR and MASTER_PORT do not say where the ranks meet; "
            "start this with evenstep run or torchrun"
        )


def omp_num_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """The value of OMP_NUM_THREADS; None if unset, or a list for nested regions, which torch does not use."""
    given = environment.get("OMP_NUM_THREADS", "")
    return int(given) or None if re.fullmatch("[0-9]{1,5}", given) else None


def begin(spec: WorkerSpec) -> None:
    """Tie this process to the launcher, name it, and install stack dumps."""
    set_spec(spec)
    if spec.parent:
        die_with(spec.parent)
    take_threads()
    # Exit handlers inherited by a fork belong to the parent: removing temporary folders, for example.
    forget_exit_handlers()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, _, _ = read_rank()
    set_process_name(f"evenstep-rank{rank}")
    install_stack_dumps(Path(spec.logs), rank)
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(Path(spec.logs) / f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, stream)
        os.close(file)
    open_output()


def take_threads() -> None:
    """Apply OMP_NUM_THREADS, which may have been set after torch was imported."""
    torch, num = sys.modules.get("torch"), omp_num_threads()
    if torch is not None and num not in (None, torch.get_num_threads()):
        torch.set_num_threads(num)


def unblock_signals() -> None:
    """Unblock the signals that the fork server blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)


def end(exit_code: int) -> None:
    """End this process at once.

    A regular interpreter exit would wait for ranks that wait for this one.
    """
    run_exit_handlers()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a script may have closed or replaced it
            stream.flush()
    os._exit(exit_code)


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies; elsewhere, only check that the parent is alive."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # the parent died before prctl was called


def signal_name(number: int) -> str:
    """`SIGKILL`, or the number of a signal without a name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def set_process_name(name: str) -> None:
    """Set the name that `top` and `ps` show, up to 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(15, name.encode())  # 15: PR_SET_NAME
