"""Processes that train on a CPU get the memory of large tensors in huge pages, and keep that of small ones.

By default glibc returns what a step frees to the system, which clears it again in the next step, in pages of 4 KiB: in
networks with large activations that takes longer than to compute. glibc reads these variables when a process starts.
Until a training begins, pages stay small: a process that imports and reads touches most of them once, and a virtual
machine may have to fetch each huge page from its host first.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from evenstep.strategy_facts import STRATEGIES

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
PR_SET_THP_DISABLE = 41
"""Of prctl(2): children inherit it."""


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
    more = huge_page_variables() if _trains_here(arguments) and sys.gettrace() is None else {}
    if more:
        with suppress(OSError):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **more})
    _keep_small(True)


def _trains_here(arguments: Sequence[str]) -> bool:
    """Whether it may; a wrong guess costs 10 ms, or the huge pages of threads whose strategy is named in a file."""
    command, *rest = [*arguments, ""]
    if command not in TRAIN_HERE or "--help" in rest:
        return False
    words = [word for text in rest for word in text.split("=", 1)]
    by_threads = {name for name, row in STRATEGIES.items() if not row.processes_per_device}
    return not by_threads.isdisjoint(words) or not any(
        name == "--devices" and ("," in value or (value.isdecimal() and int(value[:9]) > 1))
        for name, value in pairwise(words)
    )


@contextmanager
def huge_pages_later() -> Iterator[dict[str, str]]:
    """What to set for processes that are started inside the block; they have small pages until `use_huge_pages`."""
    more = huge_page_variables()
    if more:
        _prctl(1)
    try:
        yield more
    finally:
        if more:
            _prctl(0)


def use_huge_pages() -> None:
    """Before a training: from now on, and in children, large tensors are in huge pages if they were asked for here."""
    _keep_small(False)


def _keep_small(is_small: bool) -> None:
    if os.environ.get(NAME) == VALUE:
        _prctl(int(is_small))


def _prctl(value: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, value, 0, 0, 0)
