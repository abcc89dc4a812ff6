"""What a plain training imports of evenstep, in a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fresh
TASK = """
import sys
from dataclasses import replace

from evenstep.tasks import digits


def task():
    return replace(digits.task(), show=lambda model: " ".join(name for name in sys.modules if "evenstep." in name))
"""
MOST = 121
UNUSED = (
    "audit",
    "checkpoint.broadcast",
    "compare",
    "distributed.collective_check",
    "distributed.shm",
    "doctor",
    "monitor.out_of_memory",
    "monitor.replica_check",
    "monitor.stragglers",
    "predict",
    "profiling",
    "strategies.ddp",
    "strategies.dp",
    "strategies.fsdp",
    "training.cuda_graphs",
    "verify",
)


def imported(folder: Path, *options: str) -> set[str]:
    """All modules of evenstep in rank 0 at the end of a training."""
    (folder / "my_task.py").write_text(TASK)
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", "--steps", "2", "--json", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names: str = json.loads(done.stdout)["shown"]
    return {name.removeprefix("evenstep.") for name in names.split()}


def test_one_device_imports_only_what_it_needs(tmp_path: Path) -> None:
    found = imported(tmp_path, "--devices", "cpu")
    assert {name for name in found if name.startswith(UNUSED)} == set()
    assert len(found) <= MOST


@pytest.mark.slow
def test_two_devices_import_the_monitors_and_shared_memory_but_no_graphs(tmp_path: Path) -> None:
    found = imported(tmp_path, "--devices", "cpu,cpu", "--strategy", "ddp")
    assert {"monitor.replica_check", "monitor.stragglers", "distributed.shm.allreduce", "strategies.ddp"} <= found
    assert {name for name in found if name.startswith(("training.cuda_graphs", "profiling", "audit"))} == set()
