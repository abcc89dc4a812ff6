"""On one GPU: with --virtual-replicas, every strategy that can share it has the bits of single.

`dp` uses the GPU twice and four times, `ddp` with two ranks on it speaks gloo; `fsdp` runs at size 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.plan import Plan
from tests.fleet import bits_of, run_jobs
from tests.small_tasks import small_task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
]

WORLDS = {1: ["single-1", "dp-2", "dp-4", "ddp-1", "fsdp-1"], 2: ["ddp-2"]}
WHERES = [where for wheres in WORLDS.values() for where in wheres if where != "single-1"]
KEYS = {
    "norm_cnn/adamw/mean": "fp32",
    "norm_cnn/sgd/mean": "bf16",
    # Not pair: on a GPU, cross_entropy of (N, C, T) adds its sum atomically.
    "gpt/adamw/mean/dropout": "fp32",
    "gpt/sgd/mean/dropout": "fp16",
}


def plan(where: str, precision: str) -> Plan:
    strategy, _, num = where.partition("-")
    return Plan(
        strategy=strategy,
        devices=("cuda:0",) * int(num),
        batch=40,
        steps=20,
        virtual_replicas=4,
        accumulate=2,
        precision=precision,
        clip=1.0,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    for size, wheres in WORLDS.items():
        jobs = [(f"{where}/{key}", plan(where, precision), key) for where in wheres for key, precision in KEYS.items()]
        run_jobs(folder, size, jobs)
    return folder


@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("key", KEYS)
def test_every_strategy_has_the_bits_of_single(runs: Path, where: str, key: str) -> None:
    assert bits_of(runs / where / key) == bits_of(runs / "single-1" / key)


def settings() -> list[object]:
    cudnn = torch.backends.cudnn
    return [cudnn.benchmark, cudnn.deterministic, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]


def test_settings_for_equal_bits_are_put_back() -> None:
    before = (
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )
    seen = []

    def task() -> evenstep.Task:
        made = small_task("mlp/adamw/mean")

        def loss(model: torch.nn.Module, batch: object) -> object:
            seen.append((torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.deterministic))
            return made.loss(model, batch)

        return evenstep.Task(model=made.model, train=made.train, loss=loss, optimizer=made.optimizer)

    evenstep.train(task, devices=["cuda:0"], batch=20, steps=2, virtual_replicas=2, progress=False)
    # The first call is the check before the start, on the CPU.
    assert set(seen[1:]) == {(True, True)}
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    after = (
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )
    assert after == before


ATOMIC = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Warped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, images):
        features = self.layer(images)
        grid = torch.tanh(features[:, :2].permute(0, 2, 3, 1))
        return F.grid_sample(features, grid, align_corners=False)


def task():
    return Task(
        model=Warped,
        train=(x,),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=64,
    )
"""


def test_verify_names_a_kernel_that_adds_atomically() -> None:
    Path("atomic.py").write_text(ATOMIC)
    command = [sys.executable, "-m", "evenstep", "verify", "atomic.py", "--exact", "--strategies", "dp", "--json", "-q"]
    ended = subprocess.run(
        [*command, "--devices", "cuda:0,cuda:0", "--steps", "3"], capture_output=True, text=True, timeout=300
    )
    assert ended.stdout, ended.stderr
    (way,) = json.loads(ended.stdout)["ways"]
    assert "grid_sampler_2d_backward_cuda" in " ".join(way["notes"])
    if ended.returncode:
        # Whether its sums differ is up to chance; where they do, the operation is named.
        assert way["cause"] in ("not-repeatable", "operation")
        assert "GridSampler" in way["operation"] or "grid_sample" in way["operation"]
