"""Flags that set how torch computes, and that are put back afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep import Task
from evenstep.distributed.devices import num_cores
from evenstep.plan import Plan
from tests.fleet import result, run_jobs

x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
seen: dict[str, object] = {}


def task() -> Task:
    return Task(
        model=lambda: nn.Linear(4, 2),
        train=x,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=10,
    )


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    seen.update(
        deterministic=torch.are_deterministic_algorithms_enabled(),
        benchmark=torch.backends.cudnn.benchmark,
        threads=torch.get_num_threads(),
    )
    return F.mse_loss(model(batch), batch[:, :2])


def test_settings_hold_while_training_and_are_put_back() -> None:
    before = torch.get_num_threads()
    evenstep.train(task, progress=False, deterministic=True, threads=1)
    assert seen == {"deterministic": True, "benchmark": False, "threads": 1}
    evenstep.train(task, progress=False, cudnn_benchmark=True)
    assert seen["deterministic"] is False
    assert seen["benchmark"] is True
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark


def test_threads_are_shared_out_among_replicas() -> None:
    evenstep.train(task, progress=False, strategy="dp", devices=("cpu",) * 2)
    assert seen["threads"] == max(1, num_cores() // 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["single-1", "ddp-2", "fsdp-2"])
def test_a_compiled_model_learns_the_same(tmp_path: Path, where: str) -> None:
    strategy, _, num = where.partition("-")
    eager = Plan(strategy=strategy, devices=("cpu",) * int(num), batch=10, steps=12, threads=1)
    compiled = Plan.from_json({**eager.to_json(), "compile": True})
    run_jobs(tmp_path, int(num), [("eager", eager, "mlp/adamw/mean"), ("compiled", compiled, "mlp/adamw/mean")])
    assert result(tmp_path, "compiled").record.losses == pytest.approx(
        result(tmp_path, "eager").record.losses, rel=1e-4
    )
