"""--replay-every: devices that compute the same micro-batch compare bits, and a faulty one is named."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evenstep.plan import Plan
from evenstep.record import Record
from evenstep.training.replay import INPUTS, LOSS, PARAMETERS, DeviceSums, judge
from tests.fleet import run_jobs
from tests.marks import first_is_quick

TASK = """
import os
import torch
from torch import nn
import evenstep
from evenstep import Task
from evenstep.training.in_loss import current_replica

fault, device, step = os.environ.get("PLANTED", "none:0:0").split(":")
is_broken = False

def planted(out):
    global is_broken
    # From this step on, and for good.
    is_broken = is_broken or evenstep.progress().step > int(step)
    if not is_broken or int(device) not in (-1, int(os.environ.get("RANK", 0)) + current_replica()):
        return out
    flipped = out.detach().clone()
    if fault == "flip":
        flipped.view(torch.int32)[0] ^= 1 << 12
    elif fault == "noise":
        flipped *= 1 + os.urandom(1)[0] / 1000
    return out + (flipped - out.detach())

def loss(model, batch):
    return (planted(model(batch[0])) - batch[1]).square().mean()

def task() -> Task:
    torch.manual_seed(1)
    x = torch.randn(96, 4)
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        train=(x, x.sum(1, keepdim=True)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=12,
        steps=60,
    )
"""


def trained(where: str, planted: str, monkeypatch: pytest.MonkeyPatch) -> subprocess.CompletedProcess[str]:
    Path("my_task.py").write_text(TASK)
    monkeypatch.setenv("PLANTED", planted)
    strategy, _, num = where.partition("-")
    devices = ",".join(["cpu"] * int(num or 1))
    how = ["--strategy", strategy, "--devices", devices, "--replay-every", "10", "--checkpoint-every", "5"]
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", *how, "--name", "run"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("where", "device", "name"),
    [
        ("ddp-3", 1, "rank 1 (cpu)"),
        pytest.param("ddp-2", 1, "rank 1 (cpu)", marks=pytest.mark.slow),
        pytest.param("ddp-2", 0, "rank 0 (cpu)", marks=pytest.mark.slow),
        pytest.param("dp-3", 2, "replica 2 (cpu)", marks=pytest.mark.slow),
        pytest.param("dp-2", 1, "replica 1 (cpu)", marks=pytest.mark.slow),
    ],
)
def test_a_device_that_flips_a_bit_is_found_at_the_next_check(
    where: str, device: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = trained(where, f"flip:{device}:24", monkeypatch)
    assert done.returncode == 1, done.stderr
    assert f"replay check after step 30: the loss on {name} is not that of r" in done.stderr
    assert "a faulty device; leave it out, and continue from the last checkpoint" in done.stderr
    record = Record.read("runs/run")
    assert [(one.step, one.outcome) for one in record.replays] == [(10, "equal"), (20, "equal"), (30, "faulty")]
    # That of before the check is the last.
    assert sorted(path.name for path in Path("runs/run/checkpoints").glob("step-*"))[-1] == "step-00000025"


def test_two_devices_that_never_agreed_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    done = trained("ddp-2", "flip:1:0", monkeypatch)
    assert done.returncode == 1
    assert (
        "differs between devices, each of which repeats itself: rank 0 (cpu) or rank 1 (cpu) is faulty" in done.stderr
    )


def test_a_device_that_does_not_repeat_itself_is_faulty_if_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    done = trained("ddp-2", "noise:1:24", monkeypatch)
    assert done.returncode == 1
    assert "replay check after step 30: the loss differs when rank 1 (cpu) computes it twice" in done.stderr
    assert "not on other devices: a faulty device" in done.stderr


@pytest.mark.parametrize("where", first_is_quick(["ddp-2", "single", "dp-2"]))
def test_a_nondeterministic_loss_is_no_faulty_device(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = trained(where, "noise:-1:24", monkeypatch)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the loss differs when") == 1
    assert "the loss depends on more than its inputs" in done.stderr or where == "single"
    assert "6 replay checks, 4 without equal bits; they took" in done.stderr
    assert {one.outcome for one in Record.read("runs/run").replays[2:]} == {"nondeterministic"}


def digest(run: Path) -> str:
    content = hashlib.sha256()
    for file in ("weights", "optimizer"):
        for name, tensor in sorted(load_file(run / "checkpoints" / "latest" / f"{file}.safetensors").items()):
            content.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


SOUND = ["norm/adamw/mean/dropout", "gpt/adamw/pair", "averaged/sgd/mean", "mlp/sgd/mean/stream", "mlp/sgd/mean/rows"]
VIRTUAL = {"replicas": 4, "shares": "3,1", "accumulate": 2}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    (SOUND[0], 200, {}),
    *((key, 200, {}) for key in SOUND[1:]),
    ("mlp/adamw/mean/dropout", 60, VIRTUAL),
    ("cnn/adamw/mean", 60, {"accumulate": 2, "precision": "bf16", "shares": "3,1"}),
    (SOUND[0], 10_000, {}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("key", "steps", "more"),
    [pytest.param(*case, marks=() if number == 0 else pytest.mark.slow) for number, case in enumerate(CASES)],
)
def test_a_sound_task_gives_no_alarm_and_the_same_bits_as_without(
    tmp_path: Path, key: str, steps: int, more: dict[str, Any]
) -> None:
    every = 1 if steps <= 200 else 7
    wheres = {"single": 1, "dp-2": 1, "ddp-2": 2}
    for size in (1, 2):
        plans = {where: plan_of(where, steps, more) for where, num in wheres.items() if num == size}
        # The threads of dp draw from one generator of the CPU in any order, unless they have virtual replicas.
        keys = {where: key.removesuffix("/dropout") if where == "dp-2" and not more else key for where in plans}
        jobs = [(f"{where}-plain", one, keys[where]) for where, one in plans.items()]
        jobs += [(f"{where}-checked", replace(one, replay_every=every), keys[where]) for where, one in plans.items()]
        run_jobs(tmp_path, size, jobs)
    for where in wheres:
        assert digest(tmp_path / f"{where}-checked") == digest(tmp_path / f"{where}-plain")
        replays = Record.read(tmp_path / f"{where}-checked").replays
        assert len(replays) == steps // every
        assert {one.outcome for one in replays} == {"equal"}
        assert len({one.replica for one in replays}) == (1 if where == "single" else 2)


def plan_of(where: str, steps: int, more: dict[str, Any]) -> Plan:
    strategy, _, num = where.partition("-")
    shares = {"shares": None} if strategy == "single" else {}
    return Plan(
        strategy=strategy,
        devices=("cpu",) * int(num or 1),
        **{"batch": 8, "threads": 1, "steps": steps, **more, **shares},
    )


def test_fsdp_is_refused() -> None:
    Path("my_task.py").write_text(TASK)
    command = ["train", "my_task.py", "--strategy", "fsdp", "--devices", "cpu,cpu", "--replay-every", "10"]
    done = subprocess.run([sys.executable, "-m", "evenstep", *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--replay-every compares whole gradients" in done.stderr


def device(name: str, loss: int, again: int | None = None, kind: str = "cpu", inputs: int = 1) -> DeviceSums:
    sums = {INPUTS: inputs, PARAMETERS: 2, LOSS: loss, "the gradient of weight": loss}
    return DeviceSums(name, kind, sums, {**sums, LOSS: loss if again is None else again})


def test_what_differs_is_judged_by_who_repeats_what() -> None:
    a, b, c, odd = device("a", 5), device("b", 5), device("c", 5), device("odd", 6)
    assert judge([a, b], None, None).outcome == "equal"
    assert judge([a, odd, b], None, None).text.startswith("the loss on odd is not that of a, time and again")
    assert judge([odd, a], None, [False, True]).text.startswith("the loss on odd is not that of a")
    assert "a or odd is faulty" in judge([a, odd], None, [None, None]).text
    # Bits differ between kinds of GPU.
    assert judge([a, device("other", 6, kind="H200")], None, None).outcome == "equal"
    assert judge([a, device("b", 5, inputs=3)], None, None).text.startswith("the ranks read different data")
    unstable = device("d", 5, again=7)
    assert judge([a, unstable], [[1, 1], [1, 1]], None).text.endswith("a nondeterministic kernel")
    assert judge([a, unstable], [[1, 1], [1, 2]], None).outcome == "faulty"
    assert judge([unstable], [[1, 2]], None).outcome == "nondeterministic"
    assert judge([c, unstable], [[1, 3], [1, 2]], None).outcome == "nondeterministic"
