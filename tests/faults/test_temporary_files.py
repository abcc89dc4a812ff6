"""TMPDIR: however long its name is, and whatever end a run comes to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.runs import fail, steps, train

HANGING = """
import time, torch
from evenstep import Task

def update(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(1000))
    return optimizer

def task():
    data = torch.randn(8, 4)
    return Task(model=lambda: torch.nn.Linear(4, 1), train=(data,), loss=lambda model, batch: model(batch[0]).mean(),
                optimizer=update, batch=4, epochs=1)
"""


@pytest.fixture
def temporary() -> Path:
    folder = Path("temporary").resolve()
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_a_tmpdir_too_long_for_a_socket_trains_with_loader_workers_and_is_left_empty(temporary: Path) -> None:
    long = temporary / ("x" * 120)
    long.mkdir()
    ended = train("--workers", "1", task="of_samples", TMPDIR=str(long))
    assert ended.code == 0, ended.err
    assert steps() == list(range(1, 23))
    assert left(long) == []


def test_a_stall_of_ranks_leaves_nothing_in_tmpdir(temporary: Path) -> None:
    options = ("--stall-after", "1", "--workers", "0")
    ended = train(*options, fault=fail("never read", rank=1, step=4), task="of_samples", TMPDIR=str(temporary))
    assert ended.code == 124, ended.err
    assert left(temporary) == []


@pytest.mark.slow
def test_a_stall_in_the_command_itself_leaves_nothing_in_tmpdir(temporary: Path) -> None:
    Path("hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "evenstep", "train", "hanging.py", "--devices", "1", "--stall-after", "1"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 124, ended.stderr
    assert left(temporary) == []


def left(folder: Path) -> list[Path]:
    """What lies there of ours and of multiprocessing's; torch's compiler keeps a cache there."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor")]
