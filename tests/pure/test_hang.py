"""Which ranks are waiting for which rank, from what every rank was last doing."""

from __future__ import annotations

import queue
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evenstep.distributed.heartbeat import (
    BACKWARD,
    COMPARING,
    FORWARD,
    INPUT,
    LOADING,
    SAVING,
    HeartbeatState,
    make_heartbeats,
    open_heartbeat,
)
from evenstep.launcher.hang import (
    Frame,
    RankSnapshot,
    Stack,
    StallWatch,
    explain,
    late_ranks,
    main_thread,
    stacks,
    take_snapshots,
)

USERS = Frame("/home/me/my_task.py", 12, "loss")
COLLECTIVE = Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
ENGINE = Frame("/x/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward")


WRAPPER = Frame("/x/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper")
START = Frame("/x/site-packages/torch/distributed/elastic/multiprocessing/api.py", 713, "_wrap")
GATHERING = Frame(
    "/x/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 255, "foreach_all_gather"
)
QUEUE = Frame(queue.__file__, 171, "get")
READING = Stack("loader worker 1 (process 7)", [Frame("/home/me/my_task.py", 30, "__getitem__")], is_loader_worker=True)


def snapshot(rank: int, step: int, phase: int, *frames: Frame, state: str = "S") -> RankSnapshot:
    return RankSnapshot(rank, HeartbeatState(5, step, phase, 0), state, list(frames))


def test_the_rank_that_is_behind_is_named_with_the_users_line() -> None:
    found = [snapshot(0, 7, BACKWARD, ENGINE), snapshot(1, 7, FORWARD, USERS), snapshot(2, 7, BACKWARD, ENGINE)]
    said = explain(found, 3.2)
    assert said.startswith("no progress for 3 s: ranks 0, 2 are waiting for rank 1")
    assert "my_task.py:12 in loss" in said
    assert said.endswith("ranks 0, 2 wait at step 7, in backward")


def test_a_stopped_process_is_the_cause_wherever_it_is() -> None:
    found = [snapshot(0, 7, FORWARD, USERS), snapshot(1, 7, BACKWARD, state="T")]
    assert [one.rank for one in late_ranks(found)] == [1]
    assert "which is stopped (SIGSTOP) at step 7, in backward" in explain(found, 3)


def test_a_collective_that_some_ranks_do_not_call_is_named_on_both_sides() -> None:
    found = [snapshot(0, 7, FORWARD, COLLECTIVE, USERS), snapshot(1, 7, BACKWARD, ENGINE)]
    said = explain(found, 3)
    assert "rank 0 waits in all_reduce, at step 7, in forward" in said
    assert "my_task.py:12" in said
    assert "which rank 1 did not call" in said


@pytest.mark.parametrize(
    ("frames", "called"),
    [
        ([COLLECTIVE, WRAPPER, USERS, START], "all_reduce"),
        ([COLLECTIVE, WRAPPER, GATHERING, USERS], "all_reduce"),
        ([QUEUE, START], None),
        ([QUEUE, USERS, COLLECTIVE], None),
    ],
)
def test_a_collective_is_called_what_the_user_calls_it(frames: list[Frame], called: str | None) -> None:
    assert snapshot(0, 7, FORWARD, *frames).collective == called


def test_who_waits_for_a_loader_worker_is_where_that_one_is() -> None:
    reads, computes = snapshot(0, 7, INPUT, QUEUE, START), snapshot(1, 7, BACKWARD, ENGINE, START)
    found = [replace(one, others=[READING]) for one in (reads, computes)]
    said = explain(found, 3)
    assert "is waiting for rank 0, which was last seen at step 7, reading input, " in said
    assert "my_task.py:30 in __getitem__, in loader worker 1 (process 7); rank 1 waits at step 7, in backward" in said
    assert [line.strip() for line in stacks(found)[3:5]] == ["loader worker 1 (process 7):", str(READING.frames[0])]


def test_the_command_itself_is_not_the_users_code() -> None:
    found = snapshot(0, 7, FORWARD, QUEUE, Frame("/home/me/.venv/bin/evenstep", 10, "<module>"))
    assert found.users_frame is None


def test_of_ranks_that_are_equally_far_the_busy_one_is_waited_for() -> None:
    found = [snapshot(0, 7, COMPARING, COLLECTIVE), snapshot(1, 7, COMPARING, USERS)]
    assert [one.rank for one in late_ranks(found)] == [1]


def test_if_all_of_them_wait_each_is_shown() -> None:
    said = explain([snapshot(0, 7, BACKWARD, ENGINE), snapshot(1, 7, BACKWARD, ENGINE)], 3)
    assert "all ranks are waiting: rank 0 at step 7, in backward; rank 1 at step 7, in backward" in said


def test_ranks_that_have_ended_are_said_to_have() -> None:
    said = explain([snapshot(0, 7, FORWARD, USERS)], 3, [1, 2])
    assert said.startswith("no progress for 3 s: rank 0 was last seen at step 7, in forward, ")
    assert said.endswith("my_task.py:12 in loss; ranks 1-2 have ended")


def test_the_users_own_line_is_shown_however_deep_the_library_is() -> None:
    said = stacks([snapshot(0, 7, FORWARD, *[ENGINE] * 20, USERS, ENGINE)])
    assert len(said) == 7
    assert said[-1].endswith("my_task.py:12 in loss")


def test_the_main_thread_is_the_last_of_a_dump() -> None:
    dump = (
        'Thread 0x01 (most recent call first):\n  File "/a.py", line 1 in other\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "/b.py", line 2 in inner\n  File "/c.py", line 3 in outer\n'
    )
    assert [frame.name for frame in main_thread(dump)] == ["inner", "outer"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("evenstep.launcher.hang.time.monotonic", lambda: now[0])
    return now


def watched_until(moment: float, clock: list[float], watch: StallWatch) -> float | None:
    """What it says then, if it has looked every half a second."""
    still = None
    while clock[0] < moment:
        clock[0] += 0.5
        still = watch.stalled_seconds()
    return still


def test_silence_is_too_long_by_the_users_limit_or_by_the_pace_so_far(tmp_path: Path, clock: list[float]) -> None:
    heartbeats = make_heartbeats(tmp_path / "beats", 1)
    heartbeat = open_heartbeat(str(tmp_path / "beats"), 0)
    strict, patient = StallWatch(heartbeats, 3.0), StallWatch(heartbeats, None)
    for moment in (0.0, 10.0, 20.0):
        watched_until(moment, clock, patient)
        heartbeat.step += 1
        heartbeat.beat(INPUT)
        assert strict.stalled_seconds() is None
        assert patient.stalled_seconds() is None
    assert watched_until(24.0, clock, strict) == pytest.approx(4.0)
    clock[0] = 20.0
    assert watched_until(20.0 + 200.0, clock, patient) is None
    # 20 times the longest pause, which was 10 s.
    assert watched_until(20.0 + 201.0, clock, patient) == pytest.approx(201.0)


def test_time_in_which_the_launcher_was_stopped_too_does_not_count(tmp_path: Path, clock: list[float]) -> None:
    heartbeats = make_heartbeats(tmp_path / "beats", 1)
    open_heartbeat(str(tmp_path / "beats"), 0).beat(INPUT)
    watch = StallWatch(heartbeats, 3.0)
    assert watch.stalled_seconds() is None
    clock[0] = 1000.0
    assert watch.stalled_seconds() is None
    assert watched_until(1002.0, clock, watch) is None
    assert watched_until(1003.0, clock, watch) == pytest.approx(4.0)


@pytest.mark.parametrize("phase", [LOADING, SAVING])
def test_loading_and_saving_may_take_longer(tmp_path: Path, clock: list[float], phase: int) -> None:
    heartbeats = make_heartbeats(tmp_path / "beats", 1)
    open_heartbeat(str(tmp_path / "beats"), 0).beat(phase)
    watch = StallWatch(heartbeats, 3.0)
    watch.stalled_seconds()
    assert watched_until(60.0, clock, watch) is None
    assert watched_until(61.0, clock, watch) is not None


def test_programs_that_leave_no_heartbeats_are_judged_by_their_stacks(tmp_path: Path, clock: list[float]) -> None:
    places = ["one"]
    watch = StallWatch(make_heartbeats(tmp_path / "beats", 1), 5.0, lambda: places[0])
    assert watch.stalled_seconds() is None
    assert watched_until(4.5, clock, watch) is None
    places[0] = "another"
    assert watched_until(9.5, clock, watch) is None
    assert watched_until(10.5, clock, watch) == pytest.approx(5.5)
    # Who is left alone is judged again after as long a time.
    watch.restart_clock()
    assert watched_until(15.5, clock, watch) is None
    assert watched_until(16.0, clock, watch) == pytest.approx(5.5)


SLEEPER = """
import pathlib, time
from evenstep.distributed.worker_process import install_stack_dumps

install_stack_dumps(pathlib.Path("."), 0)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_process_that_is_looked_at_again_and_again_leaves_the_last_stacks_alone(tmp_path: Path) -> None:
    heartbeats = make_heartbeats(tmp_path / "beats", 1).read()
    left = tmp_path / "rank0.stacks"
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    with subprocess.Popen([sys.executable, "sleeper.py"], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = [take_snapshots({0: process.pid}, heartbeats, {0: left}, first_rank=0) for _ in range(5)]
        process.kill()
    # On a busy machine one may answer too late, and be read by the next look.
    assert ["sleeper.py"] in [[Path(frame.file).name for frame in snapshot.frames] for (snapshot,) in found]
    assert left.read_text().count("most recent call first") < len(found)
