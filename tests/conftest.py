"""What all tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import marks

# Read when torch is loaded: threads that wait sleep, since there are more processes than cores. Otherwise they take the
# time that the others need, and `verify` twice as much.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell ignores SIGINT for what it starts with `&`, and so would every command that is to be stopped by Ctrl-C here.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    marks.set_quick(config)


def pytest_sessionstart() -> None:
    """After a change of its source, build the C library again: without it, ranks would sum over gloo, unsaid."""
    from evenstep.distributed.shm import native

    if not native.path_in(native.SOURCE.parent).exists():
        native.build()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder: runs/ appears there and nowhere else."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_variables_left() -> Iterator[None]:
    """Libraries set variables when they are imported: the commands of the next test are to find none."""
    before = {*os.environ}
    yield
    for name in {*os.environ} - before:
        del os.environ[name]


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    """`join()` in a test makes a process group of this very process: the next test is to find none."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
