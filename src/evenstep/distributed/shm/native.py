"""The C part, built once at install: python -m evenstep.distributed.shm.native builds it in place.

The library's name holds a hash of its source, so that one of another version is never loaded. Where there is none (no
compiler, another architecture) everything works without. Imports nothing but the standard library: hatch_build.py loads
this file by its path.
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

SOURCE = Path(__file__).with_name("sums.c")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off")
"""Nothing of this machine alone: what is built here may be installed elsewhere."""
BUILD_SECONDS = 60


def path_in(folder: Path) -> Path:
    """What the library of this source is called."""
    return folder / f"sums-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"


def build(folder: Path = SOURCE.parent) -> Path | None:
    """Compile it, if that can be done here; where it is then."""
    compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("cc") or shutil.which("gcc")
    target = path_in(folder)
    if compiler is None or sys.platform != "linux":
        return None
    beside = target.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            [compiler, *FLAGS, "-o", str(beside), str(SOURCE)], check=True, capture_output=True, timeout=BUILD_SECONDS
        )
        # Renamed: a process that has the old one loaded keeps it, and nobody loads half of one.
        beside.replace(target)
    except (OSError, subprocess.SubprocessError):
        with suppress(OSError):
            beside.unlink()
        return None
    return target


@functools.cache
def load(folder: Path = SOURCE.parent) -> ctypes.CDLL | None:
    """The library, if it is there and fits this machine."""
    number, real, place = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    try:
        library = ctypes.CDLL(str(path_in(folder)))
    except OSError:
        return None
    library.evenstep_open.argtypes = [place, *[number] * 6]
    library.evenstep_open.restype = place
    library.evenstep_begin.argtypes = [place, place, place, number, number]
    library.evenstep_begin.restype = None
    library.evenstep_advance.argtypes = [place, real]
    library.evenstep_advance.restype = number
    library.evenstep_close.argtypes = [place]
    library.evenstep_close.restype = None
    return library


if __name__ == "__main__":
    built = build()
    print(f"built {built}" if built else "not built: no C compiler, or not on Linux; gradients are summed by torch")
