"""A run that does not move any more: who is waited for is said, with everybody's stacks, and it ends."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.report.run_list import list_runs
from tests.faults.runs import (
    FOLDER,
    LONGEST_SECONDS,
    TASK,
    Ended,
    audit,
    fail,
    processes,
    said_by_ranks,
    start,
    steps,
    train,
    weights,
)
from tests.waiting import wait_until

ONE_STEP = ("--stall-after", "3", "--checkpoint-every", "3", "--audit")


def stacks(ended: Ended) -> dict[int, list[str]]:
    """The stack of every rank, as it was shown."""
    found: dict[int, list[str]] = {}
    rank = None
    for line in ended.err.splitlines():
        begun = re.match(r"rank (\d+) at step .*:$", line)
        if begun:
            rank = int(begun[1])
            found[rank] = []
        elif rank is not None and line.startswith("    "):
            found[rank].append(line.strip())
        else:
            rank = None
    return found


@pytest.mark.smoke
def test_a_stopped_rank_is_named_with_the_stacks_of_all_and_left_behind(
    undisturbed: Callable[..., bytes],
) -> None:  # 5
    ended = train(*ONE_STEP, "--restarts", "1", fault=fail("stop", rank=1, step=8, once=True))
    assert ended.code == 0, ended.err
    assert "is waiting for rank 1, which is stopped (SIGSTOP) at step 8, in forward, faulty.py:" in ended.err
    assert stacks(ended).keys() == {0, 1}
    assert any(line.startswith("faulty.py:") for line in stacks(ended)[1])
    assert "restart 1 of 1, from step-00000006" in ended.err
    assert steps() == list(range(1, 23))
    assert audit().startswith("62 samples x 2 epochs, 0 repeated, 0 missed")
    assert weights() == undisturbed()


@pytest.mark.slow
def test_a_rank_that_never_gets_its_samples_is_named_where_others_wait_for_its_buffers() -> None:
    options = ("--stall-after", "3", "--workers", "0")
    # 60: BatchNorm refuses a last step with one sample for each rank.
    ended = train(*options, fault=fail("never read", rank=1, step=4), task="of_statistics", SAMPLES="60")
    assert ended.code == 124
    assert re.search(r"is waiting for rank 1, .*at step 4, reading input, faulty\.py:\d+", ended.err), ended.err
    assert "in __getitem__" in "".join(stacks(ended)[1])


@pytest.mark.slow
def test_a_sample_that_never_comes_from_a_loader_worker_is_named_with_the_workers_stack() -> None:  # 31
    options = ("--stall-after", "3", "--workers", "2")
    ended = train(*options, fault=fail("never read", rank=1, step=4), task="of_samples")
    assert ended.code == 124
    where = r"is waiting for rank 1, .*at step \d+, reading input, faulty\.py:\d+ in .*, in loader worker \d \(process"
    assert re.search(where, ended.report[0]), ended.err
    assert "_wrap" not in ended.report[0]
    assert "in __getitem__" in "".join(stacks(ended)[1])
    assert any(line.startswith("loader worker ") for line in stacks(ended)[1])


ALONE = """
import threading, time, torch
from dataclasses import replace
from faulty import of_samples, Samples, loss

class Slow(Samples):
    def __getitem__(self, id_):
        if torch.utils.data.get_worker_info() is not None:
            time.sleep(1000)  # in a loader worker
        return super().__getitem__(id_)

def slow_loss(model, batch):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(1000)  # in a thread
    return loss(model, batch)

def read(): return replace(of_samples(), train=Slow())
def computed(): return replace(of_samples(), loss=slow_loss)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options", "where"),
    [
        ("read", ("single", "--workers", "1"), "in __getitem__, in loader worker 0"),
        ("computed", ("dp", "--devices", "cpu,cpu"), "in slow_loss, in a thread"),
    ],
)
def test_alone_too_the_users_line_is_found_in_threads_and_loader_workers(
    task: str, options: tuple[str, ...], where: str
) -> None:  # 31
    shutil.copy(TASK, TASK.name)
    Path("alone.py").write_text(ALONE)
    # The command as it is installed: its own file was taken for the user's.
    command = [str(Path(sys.executable).with_name("evenstep")), "train", f"alone.py:{task}"]
    command += ["--stall-after", "3", "--strategy", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS)
    assert ended.returncode == 124
    last = ended.stderr.rpartition("error: ")[2]
    assert re.search(rf"rank 0 was last seen at step 1, .*, alone\.py:\d+ {re.escape(where)}", last), ended.stderr
    (run,) = list_runs(Path("runs"))
    assert (run.state, (run.error or "").partition(" for ")[0]) == ("failed", "no progress")


@pytest.mark.slow
def test_without_a_restart_it_ends_with_a_code_of_its_own() -> None:  # 5
    ended = train(*ONE_STEP, fault=fail("stop", rank=1, step=8))
    assert ended.code == 124
    assert "rank 1, which is stopped (SIGSTOP) at step 8" in ended.report[0]
    assert len(ended.report) <= 15
    assert f"continue from step-00000006: add --resume {FOLDER}" in ended.report


@pytest.mark.slow
def test_a_run_that_is_put_aside_with_ctrl_z_goes_on_afterwards() -> None:  # 5
    launcher = start("--stall-after", "3", PACE="0.1")
    wait_until((FOLDER / "record.jsonl").exists, 60)
    stopped = processes()
    for process in stopped:
        process.suspend()
    time.sleep(5)
    for process in stopped:
        process.resume()
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, said
    assert steps() == list(range(1, 23))


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreter_is_named_although_it_cannot_answer(
    undisturbed: Callable[..., bytes],
) -> None:  # 6
    ended = train(*ONE_STEP, "--restarts", "1", fault=fail("hold", rank=1, step=8, once=True))
    assert ended.code == 0, ended.err
    assert "is waiting for rank 1, which was last seen at step 8, in forward, faulty.py:" in ended.err
    assert "in hold_the_interpreter" in stacks(ended)[1][0]
    assert stacks(ended)[0]
    assert weights() == undisturbed()
    assert audit().startswith("62 samples x 2 epochs, 0 repeated, 0 missed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["skip", "other op", "other shape"])
def test_a_collective_that_differs_between_ranks_is_named_on_both_sides(kind: str) -> None:  # 7
    ended = train(*ONE_STEP, fault=fail(kind, rank=1, step=8))
    # gloo ends the process when it sees what does not fit, and waits when it does not.
    assert ended.code in (1, 124)
    report = "\n".join(ended.report)
    assert "faulty.py:" in report
    assert all(re.search(rf"rank {rank} .*at step 8, in (forward|backward)", report) for rank in (0, 1))
    assert ended.code == 124 or "--check-collectives names the line of every rank" in report
    assert len(ended.report) <= 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "called"),
    [
        ("skip", "rank 1 calls all_reduce of float64 [4] at evenstep's own line"),
        ("other op", "rank 1 calls broadcast of float32 [3] at HERE/faulty.py:"),
        ("other shape", "rank 1 calls all_reduce of float32 [5] at HERE/faulty.py:"),
        ("other dtype", "rank 1 calls all_reduce of int32 [3] at HERE/faulty.py:"),
    ],
)
def test_with_checks_on_it_is_named_at_once_with_both_lines(kind: str, called: str, tmp_path: Path) -> None:  # 7
    ended = train("--check-collectives", fault=fail(kind, rank=1, step=8))
    assert ended.code == 1
    assert ended.report[0] == "the ranks do not call the same collective:"
    assert ended.report[1].startswith(f"rank 0 calls all_reduce of float32 [3] at {tmp_path}/faulty.py:")
    assert ended.report[2].startswith(called.replace("HERE", str(tmp_path)))
    assert said_by_ranks() == ["\n".join(ended.report[:3])] * 2
