"""The C library (allreduce.c, seeds.c), built once at install.

`python -m evenstep.distributed.shm.native` builds it in place. Its file name contains a hash of its source, so that a
library of another version is never loaded. Without it (no compiler, another architecture) DDP averages gradients over
gloo. This file imports only the standard library: hatch_build.py loads it by its path.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

SOURCE = Path(__file__).with_name("allreduce.c")
SEEDS = Path(__file__).with_name("seeds.c")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off")
"""No flags for this machine's CPU: a wheel built here may be installed elsewhere."""
BUILD_SECONDS = 60


def path_in(folder: Path) -> Path:
    """The path of the library built from the current source."""
    content = SOURCE.read_bytes() + SEEDS.read_bytes()
    return folder / f"allreduce-{hashlib.sha256(content).hexdigest()[:12]}.so"


def build(folder: Path = SOURCE.parent) -> Path | None:
    """Compile the library and return its path, or None where it cannot be compiled."""
    compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("cc") or shutil.which("gcc")
    target = path_in(folder)
    if compiler is None or sys.platform != "linux":
        return None
    beside = target.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            [compiler, *FLAGS, "-o", str(beside), str(SOURCE), str(SEEDS)],
            check=True,
            capture_output=True,
            timeout=BUILD_SECONDS,
        )
        # Atomic: a process that has loaded the old file keeps it, and no process loads a partial one.
        beside.replace(target)
    except (OSError, subprocess.SubprocessError):
        with suppress(OSError):
            beside.unlink()
        return None
    return target


@functools.cache
def load(folder: Path = SOURCE.parent) -> ctypes.CDLL | None:
    """The library, or None if it is missing or does not fit this machine."""
    number, real, place = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    try:
        library = ctypes.CDLL(str(path_in(folder)))
    except OSError:
        return None
    library.evenstep_open.argtypes = [place, *[number] * 6]
    library.evenstep_open.restype = place
    library.evenstep_begin.argtypes = [place, place, place, number, number]
    library.evenstep_begin.restype = None
    library.evenstep_begin_one_way.argtypes = [place, place, place, number, number, number]
    library.evenstep_begin_one_way.restype = None
    library.evenstep_begin_tree.argtypes = [place, place, number, place, number, number, place]
    library.evenstep_begin_tree.restype = number
    library.evenstep_advance.argtypes = [place, real]
    library.evenstep_advance.restype = number
    library.evenstep_close.argtypes = [place]
    library.evenstep_close.restype = None
    library.evenstep_set_turns.argtypes = [number]
    library.evenstep_set_turns.restype = None
    library.evenstep_seed_states.argtypes = [place, number, place, place, place]
    library.evenstep_seed_states.restype = None
    return library


if __name__ == "__main__":
    built = build()
    print(f"built {built}" if built else "not built: no C compiler, or not on Linux; DDP averages gradients over gloo")
