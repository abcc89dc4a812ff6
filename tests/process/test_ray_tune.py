"""The adapter of examples/ray_tune.py, on a real local cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.test_ray import RAY

ADAPTER = Path(__file__).parents[2] / "examples/ray_tune.py"
TASK = """
import torch
from torch import nn
from evenstep import Task

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


def task(lr: float = 0.1) -> Task:
    return Task(
        model=lambda: nn.Linear(4, 1),
        train=(x,),
        valid=(x,),
        loss=lambda model, batch: (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch=8,
    )
"""
PROGRAM = """
import json, sys
from pathlib import Path
import ray
from ray import tune
sys.path.insert(0, str(Path({adapter!r}).parent))
from ray_tune import trainable

environment = {{"env_vars": {{"PYTHONPATH": sys.path[0]}}}}
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, runtime_env=environment)
found = tune.Tuner(
    trainable(str(Path("my_task.py").resolve()), "--devices", "cpu,cpu", "--epochs", "3", "--audit"),
    param_space={{"lr": tune.grid_search([1e-5, 0.05])}},
    tune_config=tune.TuneConfig(metric="loss", mode="min"),
    run_config=tune.RunConfig(storage_path=str(Path("results").resolve()), verbose=0),
).fit()
best = found.get_best_result()
found = json.dumps({{"lr": best.config["lr"], "epoch": best.metrics["epoch"], "num": len(found),
    "checkpoint": sorted(one.name for one in Path(best.checkpoint.path).iterdir())}})
Path("found.json").write_text(found)
ray.shutdown()
"""


def test_the_adapter_has_no_more_than_60_lines() -> None:
    assert len(ADAPTER.read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_task_is_a_trial_of_ray_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.tune", reason="Ray is not installed: pip install 'evenstep[ray]'")
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)
    Path("my_task.py").write_text(TASK)
    Path("search.py").write_text(PROGRAM.format(adapter=str(ADAPTER)))
    done = subprocess.run([sys.executable, "search.py"], capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(Path("found.json").read_text())
    assert (found["lr"], found["epoch"], found["num"]) == (0.05, 3, 2)
    assert "weights.safetensors" in found["checkpoint"]
