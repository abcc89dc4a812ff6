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

APART = """
from pathlib import Path
import time


def meets(mine, other):
    Path(mine).touch()
    deadline = time.monotonic() + 60
    while not Path(other).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_first():
    meets("first", "second")


def test_second():
    meets("second", "first")
"""

LONG = """
import time
import pytest


@pytest.mark.timeout(1)
def test_waits():
    time.sleep(60)


def test_passes():
    pass
"""


def outcome(*options: str) -> str:
    for number in range(4):
        Path(f"test_{number}.py").write_text(TESTS.replace("NUMBER", str(number)))
    done = run_pytest(*options)
    assert done.returncode == 1
    return done.stdout


def run_pytest(*options: str) -> subprocess.CompletedProcess[str]:
    plugins = ("-p", "tests.parallel", "-p", "no:cacheprovider", "-p", "pytest_timeout")
    command = [sys.executable, "-m", "pytest", "-rs", *plugins, *options]
    # Not the plugins of whatever is installed, whose imports take longer than the tests.
    more = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more})


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


def test_tests_of_one_file_that_share_nothing_run_at_the_same_time() -> None:
    Path("test_apart.py").write_text(APART)
    done = run_pytest("--processes", "2")
    assert done.returncode == 0, done.stdout


def test_a_test_that_exceeds_its_time_fails_with_that_reason() -> None:
    Path("test_long.py").write_text(LONG)
    done = run_pytest("--processes", "2")
    assert "1 failed, 1 passed" in done.stdout
    assert "Timeout (>1.0s)" in done.stdout


def test_tests_of_gpus_are_not_forked() -> None:
    Path("test_gpu.py").write_text("import pytest\n\n\n@pytest.mark.gpu\ndef test_passes(): pass\n")
    done = run_pytest("--processes", "2", "-o", "markers=gpu")
    assert done.returncode == 4
    assert "forks cannot use CUDA" in done.stdout + done.stderr
    assert run_pytest("-o", "markers=gpu").returncode == 0
