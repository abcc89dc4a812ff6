"""A command that is forked (tests/forked.py) finds what it finds in a new Python, and so do its ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forked import ForkedPopen, NewPopen
from tests.process.test_scripts import SCRIPTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are adopted on Linux alone")
TASK = """
import os
import sys

import sklearn.datasets

role = os.environ.get("RANK", "launcher")
code = open("look_around.py").read().replace("os.environ['RANK']", "role")
sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
exec(code, {"__name__": __name__, "role": role})

from evenstep.tasks.digits import task
"""
COMMAND = [sys.executable, "-m", "evenstep", "train", "look.py", "--devices", "2", "--steps", "1", "--name", "one"]


def seen(popen: type, folder: Path) -> dict[str, dict[str, Any]]:
    """What the launcher and each rank found."""
    folder.mkdir()
    shutil.copy(SCRIPTS / "look_around.py", folder)
    (folder / "look.py").write_text(TASK)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # Given, for readline, which pytest loads, sets variables behind Python's back.
    with popen(COMMAND, cwd=folder, env=dict(os.environ), **pipes) as process:
        assert psutil.Process(process.pid).ppid() == os.getpid()
        _, err = process.communicate(b"typed", timeout=100)
    assert process.returncode == 0, err
    return {file.stem: comparable(file.read_text(), folder) for file in folder.glob("seen*.json")}


def comparable(found: str, folder: Path) -> dict[str, Any]:
    """Without the numbers that the kernel gives each process, and what each draws."""
    found = re.sub(r"(?<=:\[)[0-9]+(?=\])|0x[0-9a-f]+", "", found.replace(str(folder), "FOLDER"))
    values: dict[str, Any] = json.loads(found)
    for name in ("EVENSTEP_RUN", "GLIBC_TUNABLES", "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        values["environment"].pop(name, None)
    # Not those of scikit-learn and SciPy, which are loaded before a rank knows how many threads it has.
    values["computing threads"] = [counts[:-1] for counts in values["computing threads"]]
    del values["drawn"]
    return values


@pytest.mark.fresh
def test_a_forked_command_and_its_ranks_find_what_a_new_python_finds(tmp_path: Path) -> None:
    forked, new = seen(ForkedPopen, tmp_path / "forked"), seen(NewPopen, tmp_path / "new")
    assert forked.keys() == new.keys() == {"seenlauncher", "seen0", "seen1"}
    for role, values in new.items():
        for name, value in values.items():
            assert forked[role][name] == value, (role, name)
