"""A process's stacks, written by C when a signal comes: no lock of the interpreter is needed for it."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

STACKS_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (8 if hasattr(signal, "SIGRTMIN") else 0)
"""One that nobody else is likely to use."""
_open_files: list[IO[str]] = []


@contextmanager
def stacks_left_in(path: Path) -> Iterator[None]:
    """Write the stacks there when asked to, for as long as the block lasts; copies of this process do so, too."""
    with path.open("a") as file:
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS_SIGNAL)


def leave_stacks(folder: Path, rank: int) -> None:
    """Write the stacks when asked to, and when the process dies of a signal such as SIGSEGV."""
    asked = (folder / f"rank{rank}.stacks").open("a")
    crashed = (folder / f"rank{rank}.crash").open("a")
    faulthandler.register(STACKS_SIGNAL, file=asked, all_threads=True)
    # All threads: one of gloo's, in C++ alone, may end the process while the main one waits in the user's line.
    faulthandler.enable(file=crashed, all_threads=True)
    # faulthandler knows them by number alone.
    _open_files.extend([asked, crashed])
