"""Uneven shares: any cut of a global batch over devices trains what one device trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.errors import PlanError
from evenstep.plan import Plan
from tests.fleet import furthest, result, run_jobs

STEPS = 30
BATCH = 10
"""The last batch of an epoch holds 3 samples: a device with a small share has none of them."""
SHARES = {"dp-2": "4,1", "dp-3": "1,5,2", "ddp-2": "7,3", "ddp-3": "1,8,1", "fsdp-2": "1,4"}
CASES = [("mlp/sgd/mean", 1), ("gpt/adamw/pair", 3), ("mlp/sgd/mean/stream", 2), ("mlp/adamw/mean/complex", 1)]


def plan(where: str, accumulate: int) -> Plan:
    strategy, _, num = where.partition("-")
    return Plan(
        strategy=strategy,
        devices=("cpu",) * int(num or 1),
        batch=BATCH * accumulate,
        steps=STEPS,
        accumulate=accumulate,
        precision="fp64",
        shares=SHARES.get(where),
        threads=1,
    )


def name(where: str, key: str) -> str:
    return f"{where}_{key.replace('/', '-')}"


def is_possible(where: str, key: str) -> bool:
    # fsdp does not train complex parameters.
    return not (where.startswith("fsdp") and "complex" in key)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("shares")
    of_this = [item.callspec.params for item in request.session.items if "where" in getattr(item, "fixturenames", ())]
    wanted = dict.fromkeys((where, one["case"]) for one in of_this for where in ("single", one["where"]))
    for size in (1, 2, 3):
        jobs = [
            (name(where, case[0]), plan(where, case[1]), case[0])
            for where, case in wanted
            if (int(where[-1]) if where.startswith(("ddp", "fsdp")) else 1) == size
        ]
        if jobs:
            run_jobs(folder, size, jobs)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("where", "case"),
    [
        pytest.param(where, case, id=f"{where}-{case[0]}", marks=() if number < 2 else pytest.mark.slow)
        for where in SHARES
        for number, case in enumerate(CASES)
        if is_possible(where, case[0])
    ],
)
def test_any_shares_train_what_one_device_trains(trained: Path, where: str, case: tuple[str, int]) -> None:
    single, other = result(trained, name("single", case[0])), result(trained, name(where, case[0]))
    assert other.record.losses == pytest.approx(single.record.losses, rel=1e-9)
    assert furthest(other.weights, single.weights) < 1e-9
    for ours, reference in zip(other.record.evaluations, single.record.evaluations, strict=True):
        assert ours.samples == reference.samples
        assert ours.values == pytest.approx(reference.values, rel=1e-9)


TASK = """
import torch
from torch import nn
from evenstep import Task

def task() -> Task:
    torch.manual_seed(1)
    x = torch.randn(64, 4)
    return Task(
        model=lambda: nn.Linear(4, 1),
        train=(x, x.sum(1, keepdim=True)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=16,
    )
"""


def evenstep_(*arguments: str) -> subprocess.CompletedProcess[str]:
    Path("my_task.py").write_text(TASK)
    command = [sys.executable, "-m", "evenstep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


DDP = ("train", "my_task.py", "--strategy", "ddp", "--devices", "cpu,cpu")


def test_a_resume_keeps_them_and_drops_them_on_other_devices() -> None:
    first = evenstep_(*DDP, "--shares", "5,3", "--audit", "--name", "first")
    assert first.returncode == 0, first.stderr
    assert "global batch 16 = 2 devices x 6-10 (shares 5,3); 4 steps per epoch" in first.stderr
    assert "64 samples, 0 repeated, 0 missed" in first.stdout
    same = evenstep_("train", "--resume", "runs/first", "--epochs", "2", "--name", "same")
    assert same.returncode == 0, same.stderr
    assert json.loads(Path("runs/same/plan.json").read_text())["shares"] == "5,3"
    alone = evenstep_("train", "--resume", "runs/first", "--epochs", "2", "--devices", "1", "--name", "alone")
    assert alone.returncode == 0, alone.stderr
    assert "the shares 5,3 were those of 2 devices, and this run has 1: they are dropped" in alone.stderr
    assert json.loads(Path("runs/alone/plan.json").read_text())["shares"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shares", "5"), "--shares 5 has 1 number for 2 devices; give one for each"),
        (("--shares", "5,0"), "shares is '5,0'; write a whole number from 1 up for each device, such as 5,3, or auto"),
        (("--shares", "99,1"), "use --batch 100 or more"),
        (("--shares", "5,3", "--devices", "1", "--strategy", "single"), "there is one; leave it out"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_the_start(words: tuple[str, ...], message: str) -> None:
    done = evenstep_(*DDP, *words)
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")
    assert not Path("runs").exists()


def test_numbers_for_a_changing_number_of_machines_are_refused() -> None:
    with pytest.raises(PlanError, match="may be fewer or more; use --shares auto"):
        Plan(batch=8, steps=1, strategy="ddp", devices=("cpu",), machines="1:2", rendezvous="a:1", shares="5,3")
