"""`tests/parallel.py`, by which `make test` runs files at the same time, reports what one process would report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import os
import pytest


@pytest.fixture(scope="module")
def shared():
    yield os.getpid()
    print("ended", os.getpid())


def test_passes(shared, tmp_path):
    print("printed")
    tmp_path.joinpath("file").touch()


def test_runs_in_the_process_of_its_file(shared, capfd):
    os.system("echo shown")
    assert capfd.readouterr().out == "shown\\n"
    assert shared == os.getpid()


def test_fails_or_dies(shared):
    print("printed by NUMBER")
    if NUMBER == 1:
        os.abort()
    assert NUMBER != 0


def test_is_skipped_or_passes():
    if NUMBER == 2:
        pytest.skip("of no use")
"""


def outcome(*options: str) -> str:
    for number in range(4):
        Path(f"test_{number}.py").write_text(TESTS.replace("NUMBER", str(number)))
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "tests.parallel", "-p", "no:cacheprovider", *options]
    path = str(Path(__file__).parents[2])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1
    return done.stdout


def test_every_test_has_one_outcome_and_one_that_kills_its_process_fails() -> None:
    said = outcome("--processes", "2")
    assert "2 failed, 13 passed, 1 skipped" in said
    assert "the process that ran it ended with exit code -6" in said
    assert "printed by 0" in said
    assert "printed by 2" not in said
    assert "of no use" in said


def test_after_as_many_failures_as_allowed_nothing_more_is_started() -> None:
    *_, last = outcome("--processes", "2", "-x").splitlines()
    assert sum(map(int, re.findall(r"(\d+) (?:failed|passed|skipped)", last))) < 16
