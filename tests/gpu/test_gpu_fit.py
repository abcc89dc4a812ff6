"""`fit` and `--micro auto` on a GPU, of which a part stands in for a smaller one."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenstep import Task
from evenstep.distributed.devices import free_gpu_bytes
from evenstep.fit.device_memory import only
from evenstep.plan import Plan
from evenstep.training.trainer import perform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TASK = """
import torch
from torch.nn import functional as F
from evenstep import Task
from evenstep.tasks.networks import GPT


def loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def task() -> Task:
    text = torch.randint(65, (512, 257), generator=torch.Generator().manual_seed(0))
    return Task(
        model=lambda: GPT(65, 256, 4, 4, 256),
        train=(text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=256,
        steps=3,
    )
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    Path("my_task.py").write_text(TASK)
    done = subprocess.run([sys.executable, "-m", "evenstep", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_a_smaller_gpu_gets_smaller_micro_batches_and_the_forecast_is_right() -> None:
    found: dict[str, Any] = json.loads(run("fit", "my_task.py", "--memory", "3GB", "--json").stdout)
    (row,) = found["rows"]
    assert 1 < row["accumulate"] < 64
    assert row["tried"][0]["fits"]
    assert -0.05 < row["error"] < 0.1
    assert row["measured_bytes"] < 3e9


def test_auto_trains_the_whole_share_where_it_fits() -> None:
    run("train", "my_task.py", "--micro", "auto", "--name", "auto")
    assert json.loads(Path("runs/auto/plan.json").read_text())["accumulate"] == 1


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2))


def test_runs_in_one_process_use_one_stream_and_keep_nothing() -> None:
    # cuBLAS keeps a workspace for each stream for as long as the process lives.
    data = torch.randn(16384, 256)
    task = Task(
        model=wide,
        train=(data, (data.sum(1) > 0).long()),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )
    kept = []
    for name in ("first", "second", "third"):
        Path(name).mkdir()
        for _ in perform(Plan(batch=8192, steps=3, devices=("cuda:0",), name=name), task, Path(name)):
            pass
        gc.collect()
        torch.cuda.empty_cache()
        kept.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert kept[0] == kept[1] == kept[2]


def test_what_is_free_respects_the_part_of_a_gpu_that_torch_may_take() -> None:
    # Whether a CUDA graph is captured depends on it: under a limit, captures ran out of memory.
    device = torch.device("cuda:0")
    gc.collect()
    torch.cuda.empty_cache()
    # What earlier tests of this process still hold counts too.
    with only(device, torch.cuda.memory_allocated() + 10**9):
        assert free_gpu_bytes(device) <= 10**9
        taken = torch.empty(4 * 10**8, dtype=torch.uint8, device=device)
        assert free_gpu_bytes(device) <= 6 * 10**8
        del taken
        assert free_gpu_bytes(device) > 8 * 10**8
    assert free_gpu_bytes(device) > 10**9
