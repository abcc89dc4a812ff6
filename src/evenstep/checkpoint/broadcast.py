"""Sends a checkpoint of the first machine to ranks on machines that do not share its file system."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from evenstep.checkpoint import files
from evenstep.distributed.temporary_folders import live_folder
from evenstep.distributed.world import World

PART_BYTES = 2**26
_copies = ExitStack()
"""Folders of checkpoints that were sent to this machine."""


def broadcast_checkpoint(world: World, where: str | None) -> str | None:
    """The path at which this rank finds what rank 0 has at `where`; all ranks call this."""
    if where is None or world.size == 1:
        return where
    digests = world.gather(_digest(Path(where)))
    if all(digest == digests[0] for digest in digests) or digests[0] is None:
        return where
    mine = Path(where) if world.is_main or digests[world.rank] == digests[0] else None
    source = Path(where)
    names = [str(path.relative_to(source.parent)) for path in _files(source)] if world.is_main else []
    (names, *_) = world.gather(names)
    target = mine.parent if mine is not None else _copies.enter_context(live_folder())
    for name in names:
        _send(world, target / name, is_written=mine is None)
    return str(target / source.name)


def remove_copies() -> None:
    """Remove the copies, once they are loaded."""
    _copies.close()


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.iterdir() if one.is_file())


def _digest(path: Path) -> str | None:
    """A digest of a checkpoint, or of a file of weights; None if there is nothing."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    sums = path / files.SUMS
    return sums.read_text() if sums.is_file() else None


def _send(world: World, path: Path, is_written: bool) -> None:
    """Broadcast one file of rank 0, in parts; ranks that lack it write it."""
    (size, *_) = world.gather(path.stat().st_size if world.is_main else None)
    if is_written:
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb" if is_written else "rb") as file:
        for start in range(0, size, PART_BYTES):
            num = min(PART_BYTES, size - start)
            part = torch.empty(num, dtype=torch.uint8)
            if world.is_main:
                part = torch.frombuffer(bytearray(file.read(num)), dtype=torch.uint8)
            dist.broadcast(part, 0)
            if is_written:
                file.write(part.numpy().tobytes())
