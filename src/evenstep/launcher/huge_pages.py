"""Processes that train on a CPU get the memory of large tensors in huge pages, and keep that of small ones.

By default glibc returns what a step frees to the system, which clears it again in the next step, in pages of 4 KiB: in
networks with large activations that takes longer than to compute. glibc reads these variables when a process starts.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NAME = "GLIBC_TUNABLES"
VALUE = ":".join(
    [
        "glibc.malloc.hugetlb=1",
        # Larger tensors have memory of their own: a step takes as much in every process. Smaller ones share a heap.
        f"glibc.malloc.mmap_threshold={8 << 20}",
        f"glibc.malloc.trim_threshold={1 << 30}",
    ]
)
OWN_CHOICES = (NAME, "LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Where one of these is set, the user has chosen how memory is taken."""
FIRST_GLIBC = (2, 35)
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
TRAIN_HERE = ("train", "evaluate")
"""Commands that may compute in their own process."""


def huge_page_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to set for a process that is to be started; nothing where it was chosen, or would not help."""
    is_chosen = any(name in environment for name in OWN_CHOICES)
    return {} if is_chosen or not has_huge_pages() or _has_gpus() else {NAME: VALUE}


def has_huge_pages() -> bool:
    """Whether malloc can ask for them: without, large tensors of their own would make steps slower."""
    with suppress(OSError, ValueError, AttributeError):
        version = re.match(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
        is_new = version is not None and (int(version[1]), int(version[2])) >= FIRST_GLIBC
        return is_new and "[never]" not in ENABLED.read_text()
    return False


def _has_gpus() -> bool:
    # There the tensors of a step are not malloc's.
    return any(path.exists() for path in DRIVERS)


def start_again_for(arguments: Sequence[str]) -> None:
    """Start this very command again with the variables set, if it may train in this process."""
    is_traced = sys.gettrace() is not None
    if not arguments or arguments[0] not in TRAIN_HERE or "--help" in arguments or is_traced:
        return
    if more := huge_page_variables():
        with suppress(OSError):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **more})
