"""With --virtual-replicas: BatchNorm, fsdp, and verify --exact, which proves the bits on the user's own task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep.plan import Plan
from tests.fleet import bits_of, run_jobs
from tests.marks import first_is_quick, num_steps

pytestmark = pytest.mark.timeout(400)
STEPS = num_steps(4, 8)
IMAGES = torch.randn(64, 6, 4, 4, generator=torch.Generator().manual_seed(0))
SHAPES = {nn.BatchNorm1d: IMAGES[..., 0], nn.BatchNorm2d: IMAGES, nn.BatchNorm3d: IMAGES.unsqueeze(2)}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", SHAPES)
def test_running_statistics_are_the_mean_of_those_of_virtual_replicas(
    kind: Any, momentum: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = SHAPES[kind]
    team = evenstep.join("single", devices=["cpu"], virtual_replicas=4)
    model = team.wrap(nn.Sequential(kind(6, momentum=momentum)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean, variance = torch.zeros(6), torch.ones(6)
    for number, batch in enumerate(team.loader((data,), batch=32, shuffle=False), 1):
        team.backward(lambda net, batch: net(batch[0]).pow(2).mean(), model, batch)
        team.step(optimizer)
        rate = momentum if momentum is not None else 1 / number
        parts = [part.transpose(0, 1).flatten(1) for part in data[32 * (number - 1) : 32 * number].chunk(4)]
        mean = (1 - rate) * mean + rate * torch.stack([part.mean(1) for part in parts]).mean(0)
        variance = (1 - rate) * variance + rate * torch.stack([part.var(1) for part in parts]).mean(0)
    (layer,) = model.module
    assert layer.num_batches_tracked == 2
    torch.testing.assert_close(layer.running_mean, mean)
    torch.testing.assert_close(layer.running_var, variance)


class Counting(nn.Module):
    """Counts samples, in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.layer(x)


def test_a_count_that_differs_between_virtual_replicas_is_named() -> None:
    team = evenstep.join("single", devices=["cpu"], virtual_replicas=3)
    model = team.wrap(Counting())
    (batch,) = team.loader((torch.ones(8, 3),), batch=8)
    with pytest.raises(evenstep.errors.TaskError, match="forward changes the buffer seen, whose whole numbers differ"):
        team.backward(lambda net, batch: net(batch[0]).mean(), model, batch)


def test_sync_batchnorm_is_named() -> None:
    team = evenstep.join("single", devices=["cpu"], virtual_replicas=2)
    model = team.wrap(nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)))
    (batch,) = team.loader((torch.ones(8, 3),), batch=8)
    with pytest.raises(evenstep.errors.TaskError, match="1 is a SyncBatchNorm"):
        team.backward(lambda net, batch: net(batch[0]).mean(), model, batch)


def plan(strategy: str, num: int, **more: Any) -> Plan:
    fields = {"batch": 40, "steps": STEPS, "virtual_replicas": 4, "clip": 1.0, "accumulate": 2, **more}
    return Plan(strategy=strategy, devices=("cpu",) * num, **fields)


KEYS = ["norm_cnn/adamw/mean", "gpt/sgd/pair/dropout"]
MORE_KEYS = [
    *(
        "norm/adamw/mean",
        "cnn/adamw/mean/dropout",
        "gpt/adamw/mean/dropout",
        "norm_cnn/sgd/mean",
        "tied/adamw/mean",
        "mlp/sgd/decayed",
    ),
    *("experts/adamw/mean", "heads/sgd/pair", "idle/adamw/mean", "later/sgd/mean", "averaged/sgd/mean"),
]


def check_bits(folder: Path, keys: list[str], wheres: list[str], **more: Any) -> None:
    """Each of them, such as `ddp-2`, has the bits of single."""
    for where in ("single-1", *wheres):
        strategy, _, num = where.partition("-")
        size = 1 if strategy in ("single", "dp") else int(num)
        run_jobs(folder, size, [(f"{where}/{key}", plan(strategy, int(num), **more), key) for key in keys])
    for where in wheres:
        for key in keys:
            assert bits_of(folder / where / key) == bits_of(folder / "single-1" / key), (where, key)


def test_fsdp_has_the_bits_of_single(tmp_path: Path) -> None:
    check_bits(tmp_path, KEYS, ["fsdp-2"])


@pytest.mark.parametrize("where", ["dp-2", "ddp-2", pytest.param("ddp-3", marks=pytest.mark.slow)])
def test_batchnorm_has_the_bits_of_single(tmp_path: Path, where: str) -> None:
    check_bits(tmp_path, ["norm_cnn/adamw/mean", "averaged/sgd/mean"], [where])


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 3])
def test_fsdp_has_the_bits_of_single_in_unusual_tasks(tmp_path: Path, num: int) -> None:
    check_bits(tmp_path, [*KEYS, *MORE_KEYS], [f"fsdp-{num}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"precision": "bf16"}, {"precision": "fp64"}, {"virtual_replicas": 5}, {"accumulate": 1}]
)
def test_fsdp_has_the_bits_of_single_with_other_options(tmp_path: Path, more: dict[str, Any]) -> None:
    check_bits(tmp_path, KEYS, ["fsdp-3"], **more)


TASK = """
import os, time
import torch
from torch import nn
from torch.nn import functional as F
import evenstep
from evenstep import Task

draws = torch.Generator().manual_seed(3)
x = torch.randn(200, 20, generator=torch.Generator().manual_seed(0))
y = torch.arange(200) % 5


def net():
    return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))


def task_of(change):
    def loss(model, batch):
        return F.cross_entropy(change(model(batch[0])), batch[1])
    return task_with(loss)


def task_with(loss):
    return Task(
        model=net,
        train=(x, y),
        valid=(x[:50], y[:50]),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=40,
    )


def sound():
    return task_of(lambda scores: scores)


def drawn():
    return task_of(lambda scores: scores + torch.randn(scores.shape, generator=draws))


def clocked():
    return task_of(lambda scores: scores * (1 + time.time() % 1))


def ranked():
    return task_of(lambda scores: scores * (1 + 1e-6 * int(os.environ.get("RANK", "0"))))


def gathered():
    def loss(model, batch):
        scores = evenstep.gather(model(batch[0]))
        return (scores - scores.mean(0)).square().mean()
    return task_with(loss)
"""


def verify(task: str, *options: str) -> tuple[int, dict[str, Any]]:
    Path("exact_task.py").write_text(TASK)
    command = [sys.executable, "-m", "evenstep", "verify", f"exact_task.py:{task}", "--exact", "--json", "--steps", "3"]
    ended = subprocess.run([*command, "-q", *options], capture_output=True, text=True, timeout=300)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.parametrize("strategy", first_is_quick(["ddp", "fsdp"]))
def test_verify_proves_the_bits_of_a_task_with_dropout_and_batchnorm(strategy: str) -> None:
    code, found = verify("sound", "--strategies", strategy, "--devices", "2")
    assert code == 0
    assert found["is_same"] is True
    assert found["virtual_replicas"] == 4
    (way,) = found["ways"]
    assert {name for name, part in way["parts"].items() if part["is_same"] and part["difference"] == 0.0} == {
        *("loss", "gradients", "weights", "optimizer", "evaluation", "samples", "checkpoint")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "cause", "operation"),
    [
        pytest.param("drawn", "draws", "torch.randn in the loss (exact_task.py:", id="drawn"),
        pytest.param(
            "clocked", "not-repeatable", "torch.Tensor.mul in the loss (", marks=pytest.mark.slow, id="clocked"
        ),
        pytest.param("ranked", "operation", "torch.Tensor.mul in the loss (", marks=pytest.mark.slow, id="ranked"),
        pytest.param("gathered", "batch-dependent", "evenstep.gather", id="gathered"),
    ],
)
def test_verify_names_the_operation_that_differs(task: str, cause: str, operation: str) -> None:
    code, found = verify(task, "--strategies", "fsdp", "--devices", "2")
    assert code == 1
    (way,) = found["ways"]
    assert way["cause"] == cause
    assert way["operation"].startswith(operation)
    if task == "ranked":
        assert "in virtual replica 2, " in way["why"]


@pytest.mark.slow
def test_verify_names_the_operation_of_an_evaluation() -> None:
    """dp draws in the order of single where replicas run one after the other; its evaluation does not."""
    code, found = verify("drawn", "--strategies", "dp", "--devices", "2", "--accumulate", "2")
    assert code == 1
    (way,) = found["ways"]
    assert way["parts"]["weights"]["is_same"]
    assert way["why"].startswith("in the evaluation, torch.randn in the loss (")
