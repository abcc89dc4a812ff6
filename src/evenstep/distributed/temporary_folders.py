"""Private temporary folders; those of killed processes are removed by the next evenstep.

The owner holds a lock on a file in the folder while it lives. The kernel releases the lock of a dead process, also
across containers, which may share the parent folder and the host name but not process ids.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenstep.errors import BadInput, shorten

PREFIX = "evenstep-live-"
_LOCK = "lock"
LONGEST_SOCKET_PATH = 103
"""The limit of every Unix; Linux allows four bytes more."""
_SOCKET = "/pymp-01234567/listener-01234567"
"""What multiprocessing appends to the temporary folder."""
SHORT = "/tmp"
_own: list[Path] = []


@contextmanager
def live_folder() -> Iterator[Path]:
    """A folder that exists inside the block; those of killed processes are removed first."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = _hold(folder)
    _own.append(folder)
    try:
        yield folder
    finally:
        _own.remove(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _hold(folder: Path) -> int:
    """Lock the file, then rename it to the name that others look for, so that it is never seen unlocked."""
    lock = os.open(folder / "making", os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / "making", folder / _LOCK)
    return lock


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if not _is_own(folder):
                continue
            # A world-writable folder: opening a named pipe would block forever, a symlink would lead elsewhere.
            lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or not yet locked
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its owner is alive
        finally:
            os.close(lock)


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def make_socket_folder() -> None:
    """Make the folder in which multiprocessing opens its sockets, for this process and its children.

    It is removed when this process ends; one made by a child would be left behind if the child is killed. If TMPDIR is
    too long for a socket's path, only this folder is in /tmp.
    """
    from multiprocessing.util import get_temp_dir  # Imported here, to keep --help fast.

    usual = tempfile.gettempdir()
    is_short = len(os.fsencode(usual + _SOCKET)) <= LONGEST_SOCKET_PATH
    before = tempfile.tempdir
    tempfile.tempdir = usual if is_short else SHORT
    try:
        get_temp_dir()
    except OSError as error:
        most = LONGEST_SOCKET_PATH - len(_SOCKET)
        raise BadInput(
            f"TMPDIR is {shorten(usual)}, too long for a socket, and {SHORT} cannot be written ({error.strerror}); "
            f"set TMPDIR to a folder of at most {most} characters"
        ) from error
    finally:
        tempfile.tempdir = before


def remove_own_folders() -> None:
    """Remove all of this process's folders now, before an exit without Python's cleanup."""
    from multiprocessing.util import get_temp_dir

    for folder in (*_own, Path(get_temp_dir())):
        shutil.rmtree(folder, ignore_errors=True)
