"""The first cause, in at most 15 lines."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from evenstep.distributed.heartbeat import BACKWARD, FORWARD, HeartbeatState
from evenstep.errors import BadInput, Preempted, Stalled, WorkerFailed
from evenstep.launcher.failure import Cause, cause, report
from evenstep.launcher.script import find_spawn, old_flag
from evenstep.worker.main import write_report

FORWARD_7, BACKWARD_7 = HeartbeatState(9, 7, FORWARD, 0), HeartbeatState(9, 7, BACKWARD, 0)


def failed(logs: Path, rank: int, error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        write_report(logs, rank, raised)


def test_a_victim_that_spoke_first_is_not_the_cause(tmp_path: Path) -> None:
    failed(tmp_path, 0, RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:17821"))
    failed(tmp_path, 1, ValueError("the sky is falling"))
    found = cause(tmp_path, {0: 1, 1: 1}, {0: BACKWARD_7, 1: FORWARD_7})
    assert found.headline == "rank 1 failed at step 7, in forward"
    assert "ValueError: the sky is falling" in found.details
    assert found.others == "rank 0 was at step 7, in backward, and was stopped"
    assert found.step == 7


def test_a_rank_that_was_killed_is_the_cause_though_it_said_nothing(tmp_path: Path) -> None:
    failed(tmp_path, 0, RuntimeError("Connection reset by peer"))
    heartbeats = {0: BACKWARD_7, 1: FORWARD_7}
    found = cause(tmp_path, {0: 1, 1: -signal.SIGKILL}, heartbeats)
    assert found.headline == "rank 1 was ended by SIGKILL at step 7, in forward"
    found = cause(tmp_path, {1: -signal.SIGKILL}, heartbeats, evidence="The kernel killed it.")
    assert found.headline == "rank 1 ran out of memory at step 7, in forward"


def test_a_report_has_at_most_15_lines_whatever_the_message(tmp_path: Path) -> None:
    failed(tmp_path, 0, ValueError("\n".join(f"line {number}" for number in range(100))))
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    causes = [cause(tmp_path, {0: 1}, {0: FORWARD_7, 1: BACKWARD_7}) for _ in range(9)]
    error = report(causes, tmp_path, "step 7 has failed twice: it would fail again")
    assert isinstance(error, WorkerFailed)
    lines = str(error).splitlines()
    assert len(lines) <= 15
    assert lines[0] == "rank 0 failed at step 7, in forward"
    assert lines[-3:] == [
        "step 7 has failed twice: it would fail again",
        f"full logs: {tmp_path / 'logs'}",
        f"continue from step-00000005: add --resume {tmp_path}",
    ]
    assert any(line.startswith("attempt 8: rank 0 failed at step 7") for line in lines)


def test_a_message_of_100_mb_is_shortened_and_its_exception_kept(tmp_path: Path) -> None:
    failed(tmp_path, 0, ValueError("it begins" + "x" * 10**8 + "it ends"))
    assert (tmp_path / "rank0.error.json").stat().st_size < 10**5
    (line,) = cause(tmp_path, {0: 1}, {0: FORWARD_7}).details[1:]
    assert len(line) <= 1000
    assert line.startswith("ValueError: it begins")
    assert line.endswith("it ends")


@pytest.mark.parametrize("kind", [WorkerFailed, BadInput, Stalled])
def test_a_cause_travels_to_other_machines_as_json(kind: type) -> None:
    sent = Cause("rank 3 failed", ("a", "b"), 7, "rank 0 waited", True, kind, "host1")
    assert Cause.from_json(json.loads(json.dumps({**sent.to_json(), "more": 1}))) == sent


def test_exit_codes_mean_something() -> None:
    codes = {kind.__name__: kind.exit_code for kind in (WorkerFailed, BadInput, Preempted, Stalled)}
    assert codes == {"WorkerFailed": 1, "BadInput": 2, "Preempted": 75, "Stalled": 124}


@pytest.mark.parametrize(
    ("declared", "flag"),
    [
        ('parser.add_argument("--local_rank", type=int)', "--local_rank"),
        ('parser.add_argument("--local-rank", type=int)', "--local-rank"),
        ('parser.add_argument("--local-rank", "--local_rank", default=int(f()))', "--local-rank"),
        ('@click.option("--local_rank")\ndef main(): ...', "--local_rank"),
        ('print("--local_rank")', None),
        ("this is not python", None),
    ],
)
def test_an_old_script_is_told_its_rank_in_the_spelling_that_it_knows(declared: str, flag: str | None) -> None:
    assert old_flag(declared) == flag
    assert old_flag(declared, ["--local_rank=1"]) is None


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.multiprocessing as mp\n\nmp.spawn(train, args=(2,))", (3, "mp.spawn", "train")),
        ("from torch import multiprocessing\nmultiprocessing.spawn(fn=a.b)", (2, "multiprocessing.spawn", "a.b")),
        ("from torch.multiprocessing import spawn\nspawn(lambda rank: 1)", (2, "spawn", "")),
        ("from torch.multiprocessing import start_processes as go\ngo(train)", (2, "go", "train")),
        ("from torch.multiprocessing.spawn import spawn\nspawn()", (2, "spawn", "")),
        ("def main():\n import torch as t\n t.multiprocessing.spawn(f)", (3, "t.multiprocessing.spawn", "f")),
        (
            "import torch.multiprocessing, os\nos.environ['RANK'] = '0'\ntorch.multiprocessing.start_processes(f)",
            (3, "torch.multiprocessing.start_processes", "f"),
        ),
        ("import multiprocessing as mp\nmp.spawn(train)", None),
        ("import torch.multiprocessing as mp\nmp.Process(target=train).start()", None),
        ("from .multiprocessing import spawn\nspawn(train)", None),
        ("import torch.multiprocessing as mp\nif 'RANK' not in os.environ:\n mp.spawn(train)", None),
        ("import torch.multiprocessing as mp\nos.environ['LOCAL_RANK']\nmp.spawn(train)", None),
        ("import torch.multiprocessing as mp\nos.environ.get('RANK', 0)\nmp.spawn(train)", None),
        ("spawn(train)", None),
        ("this is not python", None),
    ],
)
def test_a_script_that_starts_its_own_processes_is_recognised(source: str, found: tuple[int, str, str] | None) -> None:
    call = find_spawn(source)
    assert (call and (call.line, call.name, call.function)) == found
