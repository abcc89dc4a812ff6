"""A run that is asked to stop, or whose launcher is killed: nothing stays behind but a whole checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.record import Record
from tests.faults.runs import (
    CHECKPOINTS,
    TASK,
    audit,
    fail,
    nothing_is_left,
    processes,
    saved_step,
    start,
    steps,
    train,
    weights,
)
from tests.waiting import wait_until

READ_BY_WORKERS = ("--workers", "2", "--audit")


def test_nothing_outlives_a_killed_launcher() -> None:  # 8
    launcher = start("--workers", "2", "--checkpoint-every", "1", "--epochs", "100", task="of_samples", PACE="0.1")
    wait_until((CHECKPOINTS / "latest").exists, 60)
    names = [process.name() for process in processes()]
    assert {"evenstep-rank0", "evenstep-rank1"} <= set(names)
    assert names.count("evenstep-reader") == 4
    launcher.kill()
    # 3 s are asked for; a busy machine gets twice as long.
    nothing_is_left(seconds=6)
    launcher.communicate(timeout=20)


def test_asked_to_stop_all_ranks_save_one_step_and_the_rest_is_exact(undisturbed: Callable[..., bytes]) -> None:  # 9
    ended = train(*READ_BY_WORKERS, fault=fail("term", rank=1, step=7), task="of_samples", PACE="0.05")
    assert ended.code == 75
    last = saved_step()
    assert 7 <= last < 22
    assert steps() == list(range(1, last + 1))
    assert ended.err.splitlines()[-1] == f"stopped; continue from step-{last:08d} with --resume runs/one"
    resumed = train(*READ_BY_WORKERS, "--resume", "runs/one", task="of_samples", name="two")
    assert resumed.code == 0, resumed.err
    assert steps("two") == list(range(last + 1, 23))
    assert audit("one", "two").startswith("62 samples x 2 epochs, 0 repeated, 0 missed")
    assert weights("two") == undisturbed(*READ_BY_WORKERS, task="of_samples")


@pytest.mark.slow
def test_a_rank_that_is_asked_while_it_waits_in_an_all_reduce_tells_the_others(
    undisturbed: Callable[..., bytes],
) -> None:  # 9
    ended = train("--audit", fault=fail("term in all-reduce", rank=1, step=7))
    assert ended.code == 75
    last = saved_step()
    assert 7 <= last <= 9
    assert train("--audit", "--resume", "runs/one", name="two").code == 0
    assert audit("one", "two").startswith("62 samples x 2 epochs, 0 repeated, 0 missed")
    assert weights("two") == undisturbed()


@pytest.mark.slow
def test_asked_to_stop_twice_it_still_saves(undisturbed: Callable[..., bytes]) -> None:  # 10
    ended = train(fault=fail("term twice", rank=1, step=7), PACE="0.1")
    assert ended.code == 75
    assert saved_step() == len(Record.read("runs/one").steps)
    assert train("--resume", "runs/one", name="two").code == 0
    assert weights("two") == undisturbed()


@pytest.mark.slow
def test_interrupted_in_the_middle_of_a_save_it_has_the_checkpoint_before(
    undisturbed: Callable[..., bytes],
) -> None:  # 10
    ended = train("--checkpoint-every", "3", fault=fail("int in save", rank=0, step=6))
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert saved_step() == 3
    assert ended.err.splitlines()[-1] == f"stopped; continue from step-{saved_step():08d} with --resume runs/one"
    resumed = train("--resume", "runs/one", name="two")
    assert resumed.code == 0, resumed.err
    assert weights("two") == undisturbed()


INTERRUPTED_IMPORT = """
import os, sys
from evenstep.__main__ import main


class Finder:
    def find_spec(self, name, path, target=None):
        if name == "evenstep.cli":
            os.kill(os.getpid(), int(sys.argv[1]))


sys.meta_path.insert(0, Finder())
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_asked_to_stop_while_the_command_is_imported_it_says_so_in_one_line(number: int, code: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (code, "stopped\n")


def has_ranks() -> bool:
    return any(one.name().startswith("evenstep-rank") for one in processes())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("fit", "forecasting from shapes"),
        ("verify --devices 2", ""),
        pytest.param("compare --devices 2 --links none,bf16 --seeds 2", "seed 1", marks=pytest.mark.slow),
        pytest.param("predict --devices 4 --link 10gbit", "", marks=pytest.mark.slow),
    ],
)
def test_commands_of_many_runs_stop_at_once_and_leave_no_process(
    command: str, shown: str, number: int, code: int
) -> None:
    """The loss takes longer than the test waits: nothing may wait for the end of a step."""
    shutil.copy(TASK, TASK.name)
    verb, *options = command.split()
    err = Path("stderr")
    with err.open("w") as file:
        words = [sys.executable, "-m", "evenstep", verb, f"{TASK.name}:of_tuned", *options]
        started = subprocess.Popen(words, env={**os.environ, "RANK_PACE": "60"}, stdout=subprocess.PIPE, stderr=file)
    wait_until(lambda: shown in err.read_text() and has_ranks(), 60, err.read_text)
    started.send_signal(number)
    out, _ = started.communicate(timeout=30)
    assert (started.returncode, out, err.read_text().splitlines()[-1]) == (code, b"", "stopped"), err.read_text()
    nothing_is_left(seconds=6)
