"""Checkpoints are written to a temporary folder, hashed, flushed and renamed; `latest` moves last."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from evenstep.checkpoint.files import STATE, SUMS, step_name
from evenstep.checkpoint.integrity import sha256, whole

_SPARE = ".spare-checkpoint"
_LEASES = ("ext4", "xfs", "tmpfs")
"""File systems on which a lease is refused while any program uses a file: not on overlayfs, where a mapped file is
leased, nor where other machines may use it."""
LARGE_BYTES = 2**26
"""A checkpoint that is finished in the background, and whose files the next one is written over."""


def write(folder: Path, step: int, files: Mapping[str, Callable[[Path], None]]) -> Path:
    """Write one checkpoint of `files` (each a function that fills a path) below `folder`; its final path.

    Killed at any point, this leaves the older checkpoints as they were.
    """
    beside = begin(folder, step)
    try:
        for name, fill in files.items():
            fill(beside / name)
        return finish(beside, step)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def begin(folder: Path, step: int) -> Path:
    """The empty folder that a checkpoint is written to."""
    own = f".{step_name(step)}.{os.getpid()}"
    # A process that was killed in the middle may have left this, and may have had our process id.
    for left in (folder / own, *folder.glob(f"{own}.*")):
        shutil.rmtree(left, ignore_errors=True)
    # Random: on another machine, a rank that does not see this folder would write its shards into one that was left.
    beside = folder / f"{own}.{os.urandom(8).hex()}"
    beside.mkdir(parents=True)
    return beside


def finish(beside: Path, step: int) -> Path:
    """Hash and flush what was written, and make it the latest checkpoint; its final path."""
    folder = beside.parent
    final = folder / step_name(step)
    replaced = folder / f".{final.name}.replaced"
    sums = "".join(f"{sha256(path)}  {path.name}\n" for path in sorted(beside.iterdir()))
    (beside / SUMS).write_text(sums)
    # safetensors creates files with mode 0600; give them the mode of the other files.
    mode = (beside / SUMS).stat().st_mode
    for path in [*beside.iterdir(), beside]:
        if path.is_file():
            path.chmod(mode)
        _flush(path)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    beside.rename(final)
    _flush(folder)
    # If it cannot be deleted, `prune` tries again.
    with suppress(OSError):
        _retire(replaced)
    point(folder, "latest", final.name)
    return final


def _retire(path: Path) -> None:
    """Delete a checkpoint, or keep the files of a large one as those that the next one is written over.

    Pages of a file that is there are written five times as fast as those of a new one, and stay in the page cache.
    """
    spare = path.parent / _SPARE
    if path.is_symlink():
        # Somebody has moved it elsewhere, to keep it.
        return
    if not os.path.lexists(spare) and sum(file.stat().st_size for file in path.iterdir()) >= LARGE_BYTES:
        with suppress(OSError):  # another process was first
            path.rename(spare)
            return
    shutil.rmtree(path)


def take_spares(folder: Path, beside: Path, sizes: Mapping[str, int]) -> set[str]:
    """Move files of a deleted checkpoint, of these names and sizes, to `beside`, to be written over; their names.

    What cannot be taken is deleted, before space is reserved for new files.
    """
    spare = folder / _SPARE
    can_be_known = _file_system(folder) in _LEASES
    taken = set()
    for name, num_bytes in sizes.items() if can_be_known and not spare.is_symlink() else ():
        moved = beside / name
        try:
            # Moved first: where nobody looks for it, nobody begins to use it.
            (spare / name).rename(moved)
        except OSError:
            continue
        if _is_unused(moved, num_bytes):
            taken.add(name)
        else:
            moved.unlink()
    drop_spare(folder)
    return taken


def _is_unused(path: Path, num_bytes: int) -> bool:
    """Whether this file has one name and this size, and no other program has it open or mapped."""
    try:
        with path.open("r+b") as file:
            found = os.fstat(file.fileno())
            if path.is_symlink() or found.st_size != num_bytes or found.st_nlink != 1:
                return False
            # A program that opens it while it is leased would end this one, by SIGIO; SIGURG is ignored.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            # Refused while the file is open or mapped elsewhere.
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):  # no leases but on Linux
        return False
    return True


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on, where Linux says so."""
    try:
        device = folder.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    rows = (line.split() for line in mounts)
    return next((row[row.index("-") + 1] for row in rows if row[2] == number and "-" in row), "")


def drop_spare(folder: Path) -> None:
    """Delete what `take_spares` would move."""
    spare = folder / _SPARE
    if spare.is_symlink():
        spare.unlink(missing_ok=True)
    else:
        shutil.rmtree(spare, ignore_errors=True)


def remove(beside: Path) -> None:
    """Give up a checkpoint that was begun."""
    shutil.rmtree(beside, ignore_errors=True)


def point(folder: Path, link: str, target: str) -> None:
    """Move `latest` or `best` to a checkpoint, at once or not at all."""
    temporary = folder / f".{link}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(folder / link)
    _flush(folder)


def keep_best(folder: Path, resumed: Path, step: int) -> Path | None:
    """Let `best` of a resumed run point to the best checkpoint of the run before; None if that is gone."""
    named = resumed.parent / step_name(step)
    # The run before may itself have been resumed.
    found = next((one.resolve() for one in (named, resumed.parent / "best") if (one / STATE).is_file()), None)
    if found is None or found.name != named.name:
        return None
    if found.parent != folder.resolve():
        folder.mkdir(parents=True, exist_ok=True)
        # Relative: the folder of all runs may be moved.
        point(folder, "best", os.path.relpath(found, folder.resolve()))
    return found


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep` checkpoints, the best one, and the one that `latest` names."""
    spared = {(folder / link).resolve() for link in ("latest", "best")}
    for path in whole(folder)[:-keep]:
        if path.resolve() not in spared:
            _retire(path)
    # Of processes that were killed while they wrote; a run that is killed often would fill the disk with them.
    for left in (*folder.glob(".step-*"), *folder.glob(".latest.*"), *folder.glob(".best.*")):
        left.unlink() if left.is_symlink() else shutil.rmtree(left, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
