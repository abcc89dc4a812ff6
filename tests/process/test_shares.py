"""Uneven shares: any cut of a global batch over devices trains what one device trains."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import PlanError
from evenstep.plan import PLAN_FILE, Plan, read_plan, write_plan_file
from evenstep.record import Record
from evenstep.sampling.order import Lengths
from evenstep.training.measured_shares import choose_shares, keep_in_plan, parts_of
from evenstep.verify.configurations import find_configs, plan_of
from tests.fleet import furthest, result, run_jobs
from tests.marks import first_is_quick, num_steps

STEPS = num_steps(14, 30)
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
    items = [item for item in request.session.items if item.path == request.path]
    of_this = [item.callspec.params for item in items if "where" in item.fixturenames]
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


QUICK = [("dp-2", 0), ("ddp-2", 0), ("fsdp-2", 0)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("where", "case"),
    [
        pytest.param(
            where,
            case,
            id=f"{where}-{case[0]}",
            marks=() if number < 1 and not where.endswith("3") else pytest.mark.slow,
        )
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


@pytest.mark.slow
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
    assert "--shares 5,3 was for 2 devices, and this run has 1; ignoring it" in alone.stderr
    assert json.loads(Path("runs/alone/plan.json").read_text())["shares"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    first_is_quick(
        [
            (("--shares", "5"), "--shares 5 has 1 number for 2 devices; give one for each"),
            (
                ("--shares", "5,0"),
                "shares is '5,0'; write a whole number from 1 up for each device, such as 5,3, or auto",
            ),
            (("--shares", "99,1"), "use --batch 100 or more"),
            (("--shares", "auto", "--strategy", "fsdp"), "where a fast device waits for a slow one"),
            (("--shares", "5,3", "--devices", "1", "--strategy", "single"), "there is one; leave it out"),
        ]
    ),
)
def test_what_cannot_be_shared_is_refused_before_the_start(words: tuple[str, ...], message: str) -> None:
    done = evenstep_(*DDP, *words)
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")
    assert not Path("runs").exists()


def test_numbers_for_a_changing_number_of_machines_are_refused() -> None:
    with pytest.raises(PlanError, match="may be fewer or more; use --shares auto"):
        Plan(batch=8, steps=1, strategy="ddp", devices=("cpu",), machines="1:2", rendezvous="a:1", shares="5,3")


SLOW_TASK = """
import os, time
from pathlib import Path
import torch
from torch import nn
import evenstep
from evenstep import Task

slow_rank = int(os.environ.get("SLOW_RANK", -1))

def loss(model, batch):
    # A device that takes some milliseconds for a sample, and another one that takes three times as long.
    time.sleep(0.0015 * len(batch[0]) * (3 if int(os.environ.get("RANK", 0)) == slow_rank else 1))
    if evenstep.progress().step == 45 and slow_rank >= 0 and not Path("crashed").exists():
        Path("crashed").touch()
        raise RuntimeError("planted")
    return (model(batch[0]) - batch[1]).square().mean()

def task() -> Task:
    torch.manual_seed(1)
    x = torch.randn(200, 4)
    return Task(
        model=lambda: nn.Linear(4, 1),
        train=(x, x.sum(1, keepdim=True)),
        valid=(x[:50], x[:50].sum(1, keepdim=True)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=16,
        steps=60,
    )
"""


def test_auto_moves_samples_to_the_faster_rank_and_a_restart_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("slow_task.py").write_text(SLOW_TASK)
    how = ("--precision", "fp64", "--audit")
    alone = evenstep_("train", "slow_task.py", *how, "--name", "alone")
    assert alone.returncode == 0, alone.stderr
    monkeypatch.setenv("SLOW_RANK", "1")
    ddp = ("--strategy", "ddp", "--devices", "cpu,cpu", "--shares", "auto", "--name", "both")
    both = evenstep_("train", "slow_task.py", *how, *ddp, "--checkpoint-every", "40", "--restarts", "1")
    assert both.returncode == 0, both.stderr
    record, reference = Record.read("runs/both"), Record.read("runs/alone")
    assert record.shares is not None
    assert record.shares.step == 35
    assert sum(record.shares.shares) == 16
    assert record.shares.shares[0] > record.shares.shares[1]
    given = ",".join(map(str, record.shares.shares))
    assert f"--shares auto: {given} samples of each global batch, since devices take" in both.stderr
    assert f"--shares auto: {given}, as measured before the restart" in both.stderr
    assert json.loads(Path("runs/both/plan.json").read_text())["shares"] == given
    assert record.losses == pytest.approx(reference.losses, rel=1e-9)
    assert record.evaluations[-1].values == pytest.approx(reference.evaluations[-1].values, rel=1e-9)
    assert "0 repeated" in both.stdout


@pytest.mark.slow
def test_auto_measures_each_device_of_dp() -> None:
    Path("slow_task.py").write_text(SLOW_TASK)
    how = ("--strategy", "dp", "--devices", "cpu,cpu", "--shares", "auto", "--steps", "250")
    done = evenstep_("train", "slow_task.py", *how)
    assert done.returncode == 0, done.stderr
    (run,) = Path("runs").iterdir()
    shares = Record.read(run).shares
    assert shares is not None
    assert len(shares.seconds_per_sample) == 2


def test_shares_follow_the_seconds_that_a_sample_takes() -> None:
    plan = Plan(batch=64, steps=1, strategy="ddp", devices=("cpu", "cpu"), shares="auto")
    lengths = Lengths(640)
    shares, why = choose_shares(plan, [0.002, 0.004], lengths)
    assert shares == (43, 21)
    assert why == (
        "--shares auto: 43,21 samples of each global batch, since devices take 2 to 4 ms for a sample in forward"
    )
    assert choose_shares(plan, [0.0021, 0.002], lengths)[0] == (32, 32)
    assert choose_shares(plan, [1.0, 1e-9], lengths)[0] == (32, 32)  # one sample for a device: as BatchNorm cannot
    assert choose_shares(replace(plan, accumulate=3), [9.0, 1.0], Lengths(64))[0] == (6, 58)
    # The last step has one sample, however it is shared.
    assert choose_shares(replace(plan, batch=4, steps=None, epochs=1), [2.0, 1.0], Lengths(65))[0] == (1, 3)
    assert choose_shares(plan, [1.0, 2.0], lengths, "gather waits")[0] == (32, 32)
    three = replace(plan, batch=30, devices=("cpu",) * 3)
    assert choose_shares(three, [1.0, 1.0, 2.0], Lengths(30))[0] == (12, 12, 6)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=6), st.integers(1, 6), st.integers(0, 40), st.booleans())
def test_every_device_gets_enough_and_a_faster_one_no_less(
    speeds: list[int], accumulate: int, more: int, is_virtual: bool
) -> None:
    num, least = len(speeds), accumulate if not is_virtual else 1
    auto = Plan(
        batch=num * accumulate + more if not is_virtual else (num + more) * accumulate,
        virtual_replicas=num + more if is_virtual else None,
        steps=1,
        strategy="ddp",
        devices=("cpu",) * num,
        accumulate=accumulate,
        shares="auto",
    )
    parts = parts_of(auto, tuple(speeds))
    assert sum(parts) == (auto.virtual_replicas or auto.batch)
    assert min(parts) >= least
    by_speed = sorted(zip(speeds, parts, strict=True))
    for (slow, few), (fast, many) in itertools.pairwise(by_speed):
        assert slow == fast or few <= many
    replace(auto, shares=",".join(map(str, parts)))


def test_measured_shares_replace_the_plan_in_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = Plan(batch=8, steps=1, strategy="ddp", devices=("cpu", "cpu"), shares="auto")
    write_plan_file(tmp_path, auto)
    with monkeypatch.context() as patch:
        # As if the disk were full, or the process killed.
        patch.setattr(Path, "replace", lambda *_: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            keep_in_plan(tmp_path, (5, 3))
    assert read_plan(tmp_path) == auto
    keep_in_plan(tmp_path, (5, 3))
    assert read_plan(tmp_path).shares == "5,3"
    assert [path.name for path in tmp_path.iterdir()] == [PLAN_FILE]


@pytest.mark.slow
def test_verify_takes_them() -> None:
    done = evenstep_("verify", "my_task.py", "--strategies", "ddp", "--devices", "cpu,cpu", "--shares", "5,3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ddp x 2, shares 5,3" in done.stdout


@pytest.mark.slow
def test_compare_measures_configurations_with_and_without() -> None:
    configs = find_configs("dp,ddp", "1,2", shares="5,3")
    assert [config.label for config in configs if config.shares] == ["dp x 2, shares 5,3", "ddp x 2, shares 5,3"]
    assert plan_of(Plan(batch=8, steps=1), configs[-1]).shares == "5,3"
    for refused in ("5,3,1", "auto"):
        with pytest.raises(PlanError, match="shares"):
            find_configs("ddp", "1,2", shares=refused)


@pytest.mark.slow
def test_compare_says_what_they_gain() -> None:
    done = evenstep_("compare", "my_task.py", "--strategies", "ddp", "--rounds", "1", "--steps", "5", "--shares", "5,3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Uneven shares give: ddp x 2" in done.stdout.replace("\n", " ")


@pytest.mark.slow
def test_with_virtual_replicas_any_shares_give_the_same_bits(tmp_path: Path) -> None:
    key = "mlp/adamw/mean/dropout"
    how = {"batch": 17, "steps": 40, "virtual_replicas": 5, "accumulate": 2, "clip": 1.0}
    two = {**how, "devices": ("cpu", "cpu")}
    one = {"single": Plan(**how), "dp": Plan(strategy="dp", shares="1,3", **two)}
    run_jobs(tmp_path, 1, [(name, plan, key) for name, plan in one.items()])
    shares = {None: "even", "4,1": "4-1", "2,3": "2-3"}
    jobs = [(name, Plan(strategy="ddp", shares=given, **two), key) for given, name in shares.items()]
    run_jobs(tmp_path, 2, jobs)
    names = ["single", "dp", *shares.values()]
    found = [result(tmp_path, name) for name in names]
    assert all(other.record.losses == found[0].record.losses for other in found)
    for other in found:
        assert other.weights.keys() == found[0].weights.keys()
        assert all(torch.equal(tensor, found[0].weights[name]) for name, tensor in other.weights.items())
