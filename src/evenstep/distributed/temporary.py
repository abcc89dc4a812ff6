"""Temporary folders that nobody else can look into, and that the next evenstep removes if their process was killed.

The owner holds a lock on a file in the folder for as long as it lives. The kernel lets go of the lock of a dead
process, and answers for processes of other containers too, which may share the folder above and the host name, and
count process ids of their own.
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
"""What every Unix takes; Linux takes four bytes more."""
_SOCKET = "/pymp-01234567/listener-01234567"
"""What multiprocessing puts behind the folder of temporary files."""
SHORT = "/tmp"
_own: list[Path] = []


@contextmanager
def live_folder() -> Iterator[Path]:
    """A folder for as long as the block lasts; those of killed processes are removed first."""
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
    """Lock first, and only then under the name that others look for: nobody sees it free."""
    lock = os.open(folder / "making", os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / "making", folder / _LOCK)
    return lock


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if not _is_own(folder):
                continue
            # Everybody may write here: opening a named pipe would wait for ever, a link would lead elsewhere.
            lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or not yet locked
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def make_socket_folder() -> None:
    """Make the folder in which multiprocessing opens its sockets, for this process and those that it starts.

    It is removed when this process ends; one that a child made would stay behind when the child is killed. Where
    TMPDIR is too long for a socket's path, it lies in /tmp, and it alone.
    """
    from multiprocessing.util import get_temp_dir  # Imported here: --help need not wait for it.

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
    """Remove all of this process's folders now: before an end at which Python clears nothing up."""
    from multiprocessing.util import get_temp_dir

    for folder in (*_own, Path(get_temp_dir())):
        shutil.rmtree(folder, ignore_errors=True)
