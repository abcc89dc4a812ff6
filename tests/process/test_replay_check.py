"""--replay-every: devices that compute the same micro-batch compare bits, and a faulty one is named."""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evenstep.plan import Plan
from evenstep.record import Record
from evenstep.training.replay_check import (
    INPUTS,
    LOSS,
    NUM_MORE,
    NUM_OLD,
    PARAMETERS,
    DeviceSums,
    ReplayFinding,
    judge,
    known,
)
from tests.fleet import run_jobs
from tests.marks import first_is_quick, num_examples

TASK = """
import os
import torch
from torch import nn
import evenstep
from evenstep import Task
from evenstep.training.loss_context import current_replica

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
        ("ddp-2", 1, "rank 1 (cpu)"),
        pytest.param("ddp-3", 1, "rank 1 (cpu)", marks=pytest.mark.slow),
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
    assert f"recomputation check after step 30: the loss on {name} repeatedly differs from that on r" in done.stderr
    assert "a faulty device; leave it out, and continue from the last checkpoint" in done.stderr
    record = Record.read("runs/run")
    assert [(one.step, one.outcome) for one in record.replays] == [(10, "equal"), (20, "equal"), (30, "faulty")]
    # That of before the check is the last.
    assert sorted(path.name for path in Path("runs/run/checkpoints").glob("step-*"))[-1] == "step-00000025"


@pytest.mark.slow
def test_two_devices_that_never_agreed_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    done = trained("ddp-2", "flip:1:0", monkeypatch)
    assert done.returncode == 1
    assert "differs between devices, each of which is consistent: rank 0 (cpu) or rank 1 (cpu) is faulty" in done.stderr


@pytest.mark.slow
def test_a_device_that_does_not_repeat_itself_is_faulty_if_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    done = trained("ddp-2", "noise:1:24", monkeypatch)
    assert done.returncode == 1
    assert "recomputation check after step 30: the loss differs when rank 1 (cpu) computes it twice" in done.stderr
    assert "not on other devices: a faulty device" in done.stderr


@pytest.mark.parametrize("where", first_is_quick(["dp-2", "ddp-2", "single"]))
def test_a_nondeterministic_loss_is_no_faulty_device(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = trained(where, "noise:-1:24", monkeypatch)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the loss differs when") == 1
    assert "the loss depends on more than its inputs" in done.stderr or where == "single"
    assert "6 recomputation checks, 4 not bit-identical; they took" in done.stderr
    assert {one.outcome for one in Record.read("runs/run").replays[2:]} == {"nondeterministic"}


def digest(run: Path) -> str:
    content = hashlib.sha256()
    for file in ("weights", "optimizer"):
        for name, tensor in sorted(load_file(run / "checkpoints" / "latest" / f"{file}.safetensors").items()):
            content.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


SOUND = ["norm/adamw/mean/dropout", "gpt/adamw/pair", "averaged/sgd/mean", "mlp/sgd/mean/stream", "mlp/sgd/mean/rows"]
VIRTUAL = {"virtual_replicas": 4, "shares": "3,1", "accumulate": 2}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    (SOUND[0], 30, {}),
    *((key, 200, {}) for key in SOUND),
    ("mlp/adamw/mean/dropout", 60, VIRTUAL),
    ("cnn/adamw/mean", 60, {"accumulate": 2, "precision": "bf16", "shares": "3,1"}),
    (SOUND[0], 10_000, {}),
]


def marks_of(number: int) -> list[pytest.MarkDecorator]:
    # Six runs of each: the long ones take 60,000 steps, minutes on idle cores.
    limit = pytest.mark.timeout(900 if CASES[number][1] <= 200 else 3600)
    return [limit, *[pytest.mark.slow] * (number > 0)]


@pytest.mark.parametrize(
    ("key", "steps", "more"), [pytest.param(*case, marks=marks_of(number)) for number, case in enumerate(CASES)]
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
    a, b, odd = device("a", 5), device("b", 5), device("odd", 6)
    none: list[list[bool]] = [[], [], []]
    assert judge([a, odd, b], [[1] * 9, [2] * 9, [1] * 9], none).text.startswith(
        "the loss on odd repeatedly differs from that on a:"
    )
    split = [[2] * 9, [1] * 9]
    assert judge([odd, a], split, [[False] * 3, [True] * 3]).text.startswith("the loss on odd repeatedly differs")
    assert "odd or a is faulty" in judge([odd, a], split, none).text
    assert "odd or a is faulty" in judge([odd, a], split, [[False] * 3] * 2).text
    # By luck, each repeated itself.
    assert judge([a, odd, b], [[1] * 9] * 3, none).text.endswith("a nondeterministic kernel")
    unstable = device("d", 5, again=7)
    assert judge([a, unstable], [[1] * 9, [1] * 9], none).text.endswith("a nondeterministic kernel")
    assert judge([a, unstable], [[1] * 9, [*range(9)]], none).outcome == "faulty"
    assert judge([a, unstable], [[1] * 9, [1] * 8 + [2]], none).outcome == "nondeterministic"
    assert judge([unstable], [[*range(9)]], none).outcome == "nondeterministic"
    assert judge([a, unstable], [[*range(9)], [*range(9)]], none).outcome == "nondeterministic"
    # Another kind of GPU has other kernels.
    other = device("d", 5, again=7, kind="H200")
    assert judge([a, b, other], [[1] * 9, [1] * 9, [*range(9)]], none).outcome == "nondeterministic"


def test_what_is_known_needs_no_more_computations() -> None:
    a, b, odd = device("a", 5), device("b", 5), device("odd", 6)
    assert known([a, b], set()) == ReplayFinding("equal")
    # Bits differ between kinds of GPU.
    assert known([a, device("other", 6, kind="H200")], set()) == ReplayFinding("equal")
    different = known([a, device("b", 5, inputs=3)], set())
    assert different is not None
    assert different.text.startswith("the ranks read different data")
    assert known([a, odd], {"the gradient of weight"}) is None
    for noisy in (LOSS, PARAMETERS):
        finding = known([a, odd], {noisy})
        assert finding is not None
        assert finding.outcome == "nondeterministic"


Rates = Sequence[float]
"""For each device, in which part of its computations other bits come out."""


def simulated(draw: random.Random, rates: Rates, deterministic: Rates, noisy: set[str]) -> ReplayFinding:
    """One check; with two devices, they agreed at the first one."""

    def number(rate: float) -> int:
        return 6 if draw.random() < rate else 5

    devices = [device(f"rank {rank}", number(rate), number(rate)) for rank, rate in enumerate(rates)]
    more = [[number(rate) for _ in range(NUM_MORE)] for rate in deterministic]
    holds = [[number(rate) == 5 for _ in range(NUM_OLD if len(rates) == 2 else 0)] for rate in rates]
    return known(devices, noisy) or judge(devices, more, holds)


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("is_cured", [False, True])
def test_sound_devices_with_noise_are_never_accused(num: int, is_cured: bool) -> None:
    draw = random.Random(num)
    for _ in range(num_examples(10_000)):
        rate = draw.choice([0.001, 0.01, 0.1, 0.3, 0.5, 0.9])
        found = simulated(draw, [rate] * num, [0.0 if is_cured else rate] * num, set())
        assert found.outcome != "faulty", (rate, found.text)


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("rate", [0.95, 1.0])
def test_a_device_that_flips_a_bit_always_or_mostly_is_accused(num: int, rate: float) -> None:
    draw = random.Random(num)
    for _ in range(2_000):
        faulty = draw.randrange(num)
        rates = [rate if rank == faulty else 0.0 for rank in range(num)]
        found = simulated(draw, rates, rates, set())
        if rate == 1.0 or found.outcome != "equal":
            assert found.outcome == "faulty"
            named = [rank for rank in range(num) if re.search(f"(on|when) rank {rank} ", found.text)]
            assert named == [faulty], found.text


NOISY = """
import secrets
import torch
from torch import nn
from evenstep import Task

def loss(model, batch):
    # Like a kernel with atomics: one call in ten adds in another order.
    amount = (model(batch[0]) - batch[1]).square().mean()
    return amount * (1 + 1e-6) if secrets.randbelow(10) == 0 else amount

def task() -> Task:
    torch.manual_seed(1)
    x = torch.randn(96, 4)
    return Task(
        model=lambda: nn.Linear(4, 1),
        train=(x, x.sum(1, keepdim=True)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=12,
        steps=60,
    )
"""


@pytest.mark.parametrize("strategy", first_is_quick(["dp", "ddp"]))
def test_a_loss_that_differs_now_and_then_ends_no_run(strategy: str) -> None:
    Path("noisy_task.py").write_text(NOISY)
    how = ["--strategy", strategy, "--devices", "cpu,cpu", "--replay-every", "1", "--name", "run"]
    command = [sys.executable, "-m", "evenstep", "train", "noisy_task.py", *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {one.outcome for one in Record.read("runs/run").replays} == {"equal", "nondeterministic"}
