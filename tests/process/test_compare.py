"""`evenstep compare`, by its command: what is measured, that it is whole, and what is said of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from evenstep.launcher.prepare import prepare
from evenstep.launcher.variants import run_apart, variant
from evenstep.record import PARTS, Record
from evenstep.report.comparison import Comparison
from evenstep.worker.main import Instead
from evenstep.worker.measure import Block

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(600, 20)
y = (x[:, :3].sum(1) > 0).long()


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)),
        train=(x, y),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        batch=32,
    )


def normed() -> Task:
    model = lambda: nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return Task(model=model, train=(x, y), loss=task().loss, optimizer=task().optimizer, batch=32)


def unused() -> Task:
    def model():
        net = nn.Sequential(nn.Linear(20, 2))
        net.spare = nn.Linear(3, 3)
        net.forward = lambda data: net[0](data)
        return net
    return Task(model=model, train=(x, y), loss=task().loss, optimizer=task().optimizer, batch=32)
"""
NUM_PARAMETERS = 20 * 64 + 64 + 64 * 2 + 2
QUICK = ("--rounds", "2", "--steps", "6")


@pytest.fixture(autouse=True)
def _task_file() -> None:
    Path("my_task.py").write_text(TASK)


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", "compare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def as_json(*arguments: str) -> dict[str, Any]:
    ended = compare(*arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def measured(strategy: str, num: int, **changes: Any) -> Record:
    block = Block(warm_up=2, steps=4, special=6)
    base = prepare("my_task.py", {"name": "measured"})
    prepared = variant(
        base, base.folder / "block", strategy=strategy, devices=("cpu",) * num, steps=block.plan_steps, **changes
    )
    for _ in run_apart(prepared, Instead("evenstep.worker.measure:measure", asdict(block))):
        pass
    return Record.read(prepared.folder)


def test_a_comparison_has_a_table_a_recommendation_and_a_page() -> None:
    ended = compare("my_task.py", "--devices", "1,2", *QUICK, "--name", "mine")
    assert ended.returncode == 0, ended.stderr
    for label in ("single", "dp x 2", "ddp x 2", "fsdp x 2"):
        assert f"\n{label} " in f"\n{ended.stdout}"
    assert ended.stdout.count("✓ the same") == 3
    assert "Take " in ended.stdout
    assert "Next lever: " in ended.stdout
    assert "round 2 of 2: fsdp x 2\nround 2 of 2: ddp x 2\nround 2 of 2: dp x 2\nround 2 of 2: single" in ended.stderr
    page = Path("runs/mine/page.html").read_text()
    assert "page  runs/mine/page.html" in ended.stdout
    assert "ddp x 2" in page
    found = Comparison.read("runs/mine")
    assert found.command.endswith("--rounds 2 --steps 6 --name mine")
    assert [row.label for row in found.rows] == ["single", "dp x 2", "ddp x 2", "fsdp x 2"]
    assert [len(row.runs) for row in found.rows] == [2, 2, 2, 2]
    first = [Record.read(Path("runs/mine") / row.runs[0]) for row in found.rows]
    assert all(record.losses == pytest.approx(first[0].losses, rel=1e-4) for record in first)


@pytest.mark.parametrize(("strategy", "num"), [("single", 1), ("dp", 2), ("ddp", 2), ("fsdp", 2)])
def test_the_parts_leave_no_moment_of_a_step_out(strategy: str, num: int) -> None:
    record = measured(strategy, num)
    found = record.measurement
    assert found is not None
    assert sum(found.parts.values()) == pytest.approx(found.timed_seconds, rel=1e-6)
    assert all(found.parts[name] > 0 for name in PARTS if name != "communication")
    assert (found.parts["communication"] > 0) == (num > 1)
    assert (found.without_communication_seconds is not None) == (num > 1)
    for timeline in record.timelines:
        for lane in timeline.lanes:
            if lane.name == "host":
                assert lane.spans[0][0] == "input"
                assert all(before[2] == after[1] for before, after in pairwise(lane.spans))


def test_what_is_sent_is_counted() -> None:
    found = measured("ddp", 2).measurement
    assert found is not None
    assert found.sent_bytes == 4 * NUM_PARAMETERS


def test_dp_sends_parameters_and_gradients() -> None:
    found = measured("dp", 2).measurement
    assert found is not None
    assert found.sent_bytes == 4 * 2 * NUM_PARAMETERS


def test_accumulation_sends_once_a_step() -> None:
    found = measured("ddp", 2, accumulate=4).measurement
    assert found is not None
    assert found.sent_bytes == 4 * NUM_PARAMETERS


def test_the_buckets_travel_during_backward_and_after() -> None:
    record = measured("ddp", 2)
    lanes = {(lane.rank, lane.name): lane.spans for lane in record.timelines[-1].lanes}
    assert lanes.keys() == {(0, "host"), (0, "network"), (1, "host"), (1, "network")}
    assert [name for name, _, _ in lanes[0, "network"]] == ["bucket 0"]
    backward = next(begin for name, begin, _ in lanes[0, "host"] if name == "backward")
    optimizer = next(begin for name, begin, _ in lanes[0, "host"] if name == "optimizer")
    assert backward < lanes[0, "network"][0][1] < optimizer


def test_a_way_that_learns_something_else_is_marked_and_not_recommended() -> None:
    found = as_json("my_task.py:normed", "--devices", "2", "--strategies", "ddp", *QUICK)
    single, ddp = found["rows"]
    assert (single["parity"], ddp["parity"]) == ("reference", "differs")
    assert "BatchNorm" in ddp["why"]
    assert found["advice"][0].startswith("Take single")
    assert "but it learns something else" in found["advice"][1]


def test_a_way_that_cannot_run_is_left_out_with_the_reason() -> None:
    found = as_json("my_task.py:unused", "--devices", "2", "--strategies", "ddp", *QUICK)
    assert [row["strategy"] for row in found["rows"]] == ["single"]
    assert "no gradient reaches spare.weight" in found["left_out"]["ddp x 2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("my_task.py", "--strategies", "dpp"), "unknown strategy 'dpp'; allowed are single, dp, ddp, fsdp, dp-torch"),
        (("my_task.py", "--devices", "two"), "device"),
        (("my_task.py", "--devices", "0,1"), "0 devices were asked for"),
        (("nothing.py",), "no file nothing.py"),
        (("my_task.py", "--rounds", "0"), "--rounds"),
        (("my_task.py", "--batch", "1", "--devices", "1,2"), "a global batch of 1 does not fill"),
    ],
)
def test_bad_input_is_refused_with_code_2(arguments: tuple[str, ...], said: str) -> None:
    ended = compare(*arguments)
    assert ended.returncode == 2, ended.stdout
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
