"""verify, compare, doctor and --profile on a card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.record import PARTS, Record
from evenstep.report.comparison import Comparison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(2048, 3, 16, 16, generator=torch.Generator().manual_seed(0))
y = torch.arange(2048) % 10


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(),
                                    nn.Linear(64 * 144, 256), nn.ReLU(), nn.Linear(256, 10)),
        train=(x, y),
        valid=(x[:256], y[:256]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch=128,
    )
"""


@pytest.fixture(autouse=True)
def _task_file() -> None:
    Path("my_task.py").write_text(TASK)


def evenstep(*arguments: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run([sys.executable, "-m", "evenstep", *arguments], capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return ended


def as_json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(evenstep(*arguments, "--json").stdout.splitlines()[-1])
    return found


def test_all_ways_on_one_gpu_are_measured_and_learn_the_same() -> None:
    quick = ("--rounds", "1", "--steps", "8", "--name", "mine")
    found = as_json("compare", "my_task.py", "--devices", "cuda:0/cuda:0,cuda:0", *quick)
    labels = [(row["strategy"], len(row["devices"])) for row in found["rows"]]
    assert labels == [("single", 1), ("dp", 2), ("ddp", 2), ("dp-torch", 2)], found["left_out"]
    assert [row["parity"] for row in found["rows"]] == ["reference", "same", "same", "same"]
    for row in Comparison.read("runs/mine").rows:
        measured = Record.read(Path("runs/mine") / row.runs[0]).measurement
        assert measured is not None
        assert sum(measured.parts.values()) == pytest.approx(measured.timed_seconds, rel=1e-6)
        assert all(size > 0 for size in row.peak_bytes.values())
        assert row.parts["forward"] > 0
        assert row.parts["backward"] > 0


def test_ddp_and_fsdp_over_nccl_at_size_one_are_ways_too() -> None:
    found = as_json("compare", "my_task.py", "--devices", "cuda:0", "--strategies", "ddp,fsdp", "--rounds", "1")
    assert [row["strategy"] for row in found["rows"]] == ["single", "ddp", "fsdp"], found["left_out"]
    assert [row["parity"] for row in found["rows"]] == ["reference", "same", "same"]


@pytest.mark.timeout(420)
def test_every_strategy_is_verified_on_the_gpu() -> None:
    found = evenstep("verify", "my_task.py", "--strategies", "dp,ddp,dp-torch", "--devices", "cuda:0,cuda:0")
    assert "all strategies match single" in found.stdout + found.stderr


@pytest.mark.parametrize(("strategy", "devices"), [("single", "cuda:0"), ("dp", "cuda:0,cuda:0"), ("ddp", "cuda:0")])
def test_a_trace_of_the_gpu_adds_up(strategy: str, devices: str) -> None:
    how = ("--strategy", strategy, "--devices", devices, "--profile", "8", "--name", "traced")
    evenstep("train", "my_task.py", *how)
    (found,) = json.loads(Path("runs/traced/traces/numbers.json").read_text())["ranks"]
    assert found["steps"] == 8
    assert set(found["parts"]) == set(PARTS)
    assert sum(found["parts"].values()) == pytest.approx(found["step_seconds"])


def test_the_doctor_knows_the_gpu() -> None:
    ended = subprocess.run([sys.executable, "-m", "evenstep", "doctor", "--json"], capture_output=True, text=True)
    assert ended.returncode in (0, 1), ended.stderr
    assert torch.cuda.get_device_name(0) in ended.stdout


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,cuda:0"])
def test_the_model_of_a_run_on_a_gpu_goes_out_on_the_cpu(devices: str) -> None:
    evenstep("train", "my_task.py", "--devices", devices, "--steps", "4", "--name", "mine", "--quiet")
    evenstep("checkpoint", "export", "runs/mine", "exported", "--to", "torch")
    model = Record.read("runs/mine").model()
    exported = torch.load("exported/model.pt")
    assert {weight.device.type for weight in (*model.parameters(), *exported.values())} == {"cpu"}
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
