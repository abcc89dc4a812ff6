"""Real commands on the task beside this file, in the test's own folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TASK = Path(__file__).with_name("traced_task.py")
RUN = Path("runs/one")


def train(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Train to the end; whatever is wrong with those who watch, the training succeeds."""
    shutil.copy(TASK, "task.py")
    ended = evenstep_command("train", "task.py", *options, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended


def start_training(*options: str, **environment: str) -> subprocess.Popen[str]:
    """A training that goes on while the test does something else."""
    shutil.copy(TASK, "task.py")
    return subprocess.Popen(
        [sys.executable, "-m", "evenstep", "train", "task.py", *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )


def evenstep_command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evenstep", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
