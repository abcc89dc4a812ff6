"""One checkpoint from all ranks: they write their shards at once, and rank 0 makes it the latest.

What stops a training is writing into the page cache of the machine, each rank its own shards: no rank copies them, so
that saving needs no memory. Hashing, flushing to the disk and renaming take most of the time. Rank 0 does these while
the training continues, in a thread, and all ranks learn the outcome before the next checkpoint and at the end.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from evenstep.checkpoint import atomic_write
from evenstep.checkpoint.sharded_safetensors import TensorFile
from evenstep.distributed.world import World


class LocalFolder:
    """The folder that rank 0 writes a checkpoint to which all ranks hold alike."""

    def __init__(self, path: Path) -> None:
        self.problem: str | None = None
        self._path = path

    def fill(self, name: str, file: TensorFile) -> None:
        """Write one file; `problem` says what went wrong."""
        self._try(lambda: file.fill(self._path / name, is_main=True))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"


class SharedFolder(LocalFolder):
    """The folder that all ranks write one checkpoint to; if some do not see it, rank 0 gets what they hold."""

    def __init__(self, world: World, path: Path | None) -> None:
        """`path` is that of rank 0, which has made the files."""
        (name, host), *_ = world.gather((str(path) if path is not None else "", socket.gethostname()))
        super().__init__(Path(name))
        self._is_main = world.is_main
        # Its name is random: a folder of this name is this one.
        self._gathers = not all(world.gather(self._path.is_dir()))
        self._flushes = socket.gethostname() != host
        """Whether this machine writes pages that rank 0 cannot flush."""

    def fill(self, name: str, file: TensorFile) -> None:
        """Write this rank's part of one file; all ranks call this."""
        # Not left out after a problem: others may wait for what this rank holds.
        self._try(lambda: file.fill(self._path / name, self._is_main, self._gathers, self._flushes))


@dataclass(frozen=True)
class AfterSaving:
    """What is done with a checkpoint once it is there."""

    keep: int
    is_best: bool
    in_background: bool

    def point(self, path: Path) -> None:
        """Move `best` to it, and delete old ones."""
        if self.is_best:
            atomic_write.point(path.parent, "best", path.name)
        atomic_write.prune(path.parent, self.keep)


class Finishing:
    """What is left to do for a checkpoint that all ranks have written: at once, or in a thread of rank 0."""

    def __init__(self, beside: Path, step: int, then: Callable[[Path], None]) -> None:
        self.problem: str | None = None
        self._beside, self._step, self._then = beside, step, then
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin in the background."""
        self._thread = Thread(target=self.run, name="checkpoint")
        self._thread.start()

    def run(self) -> None:
        """Hash, flush and rename; `problem` says what failed."""
        try:
            self._then(atomic_write.finish(self._beside, self._step))
        except Exception as error:
            atomic_write.remove(self._beside)
            self.problem = f"{type(error).__name__}: {error}"

    def wait(self) -> None:
        """Until it is done."""
        if self._thread is not None:
            self._thread.join()


@dataclass(frozen=True)
class Unsettled:
    """A checkpoint whose outcome not all ranks know."""

    finishing: Finishing | None
    """On rank 0."""
    step: int
    folder: Path
    saved_before: Path | None
    """The last checkpoint, if this one fails."""
