"""Temporary folders that nobody else can look into, and that the next evenstep removes if their process was killed.

The owner holds a lock on a file in the folder for as long as it lives. The kernel lets go of the lock of a dead
process, and answers for processes of other containers too, which may share the folder above and the host name, and
count process ids of their own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "evenstep-live-"
_LOCK = "lock"


@contextmanager
def live_folder() -> Iterator[Path]:
    """A folder for as long as the block lasts; those of killed processes are removed first."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = _hold(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _hold(folder: Path) -> int:
    """Lock first, and only then under the name that others look for: nobody sees it free."""
    lock = os.open(folder / "making", os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / "making", folder / _LOCK)
    return lock


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_WRONLY)
        except OSError:
            continue  # another user's, or not yet locked
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)
