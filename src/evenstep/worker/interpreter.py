"""What a script finds in a copy of the fork server: a process that looks as if Python had just been started.

All that is private to CPython's multiprocessing is here, as seen in 3.11 to 3.13.
"""

from __future__ import annotations

import atexit
import io
import logging
import multiprocessing
import os
import sys
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from multiprocessing import forkserver, process, resource_tracker, util
from types import ModuleType
from typing import Any, TextIO

_MainProcess: Any = type(multiprocessing.current_process())
"""Found while this is one: CPython deletes the name of the class."""


def leave_server() -> None:
    """Forget the fork server: a child of its is no main process, starts its own children by it and holds its pipes."""
    if multiprocessing.parent_process() is None:
        return
    # What still refers to one of these is in frames of the engine that are never returned to.
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2:
            with suppress(OSError):
                os.close(descriptor)
    process._parent_process = None  # type: ignore[attr-defined]
    process._current_process = _MainProcess()  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    # Their functions are bound to these very objects.
    vars(forkserver._forkserver).update(vars(forkserver.ForkServer()))
    vars(resource_tracker._resource_tracker).update(vars(resource_tracker.ResourceTracker()))
    sys.stdin = sys.__stdin__ = _opened_stdin()  # type: ignore[assignment, misc]
    _seed_again()


def _seed_again() -> None:
    """Python's own generator is seeded again after a fork; of the others', every rank would draw the same."""
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
    """stdout and stderr, unbuffered: torchrun starts `python -u`. A notebook's streams are not even files."""
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
    """An empty `__main__` for the script at this path, with what pickle and multiprocessing look for in it."""
    main = ModuleType("__main__")
    whole = os.path.abspath(path)
    builtins = sys.modules["builtins"]
    found = {"__file__": whole, "__loader__": SourceFileLoader("__main__", whole), "__builtins__": builtins}
    vars(main).update(found, __cached__=None, __annotations__={})
    # The second is what a child that was spawned calls it.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def tidy_up_at_exit() -> None:
    """Have Python end children and write out logs after all that the script registers, as if imported before it."""
    atexit.register(logging.shutdown)
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
