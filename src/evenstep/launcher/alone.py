"""A training in this very process, with someone to notice when it no longer moves."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenstep.errors import Stalled
from evenstep.launcher.stall import StallWatch, explain, look, stacks
from evenstep.worker.pulse import Beats, make_beats
from evenstep.worker.stacks import stacks_left_in
from evenstep.worker.temporary import live_folder, remove_own_folders
from evenstep.worker.world import BEATS

LOOK_SECONDS = 0.2
STACKS = "stacks"


@contextmanager
def ended_if_stalled(logs: Path, limit: float | None) -> Iterator[None]:
    """End the process with code 124 if what is done in the block does not move; its stacks are shown.

    A thread looks: it sees everything but C code that holds the interpreter's lock.
    """
    with live_folder() as folder, stacks_left_in(folder / STACKS):
        beats = make_beats(folder / "beats", 1)
        os.environ[BEATS] = f"{folder / 'beats'}:0"
        done = threading.Event()
        thread = threading.Thread(target=_look, args=(beats, limit, folder, logs, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            del os.environ[BEATS]
            done.set()
            thread.join()
            beats.close()


def _look(beats: Beats, limit: float | None, folder: Path, logs: Path, done: threading.Event) -> None:
    watch = StallWatch(beats, limit)
    while not done.wait(LOOK_SECONDS):
        still = watch.seconds_still()
        if still is not None and not _is_debugged():
            _explain(beats, still, folder, logs)


def _is_debugged() -> bool:
    """Whether someone sits at the prompt of a debugger, and thinks."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if Path(frame.f_code.co_filename).name in ("pdb.py", "bdb.py"):
            return True
        frame = frame.f_back
    return False


def _explain(beats: Beats, seconds: float, folder: Path, logs: Path) -> None:
    file = folder / STACKS
    (sight,) = look({0: os.getpid()}, beats.read(), {0: file}, 0)
    logs.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, logs / f"rank0.{STACKS}")
    lines = [*stacks([sight]), f"error: {explain([sight], seconds)}", f"full logs: {logs}"]
    print("\n".join(lines), file=sys.stderr, flush=True)
    remove_own_folders()
    os._exit(Stalled.exit_code)
