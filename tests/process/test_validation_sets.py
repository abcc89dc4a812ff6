"""Several named validation sets: each is evaluated as it would be alone, and the first decides what is best."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import evenstep
from evenstep.data.adapt import validation_sets
from evenstep.errors import PlanError
from evenstep.record import Record

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from evenstep import Task

draws = torch.Generator().manual_seed(0)
x = torch.randn(40, 4, generator=draws)
y = (x[:, 0] > 0).long()
clean = (x[:13], y[:13])
noisy = DataLoader(TensorDataset(x[20:37] + torch.randn(17, 4, generator=draws), y[20:37]), batch_size=5)
sets = {"both": {"clean": clean, "noisy": noisy}, "clean": clean, "noisy": noisy}

def task(valid: str = "both") -> Task:
    return Task(
        model=lambda: nn.Linear(4, 2),
        train=(x, y),
        valid=sets[valid],
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        predict=lambda model, batch: (model(batch[0])[:, 1], batch[1]),
        scores={"top": lambda predictions, targets: predictions.max()},
        batch=10,
        epochs=2,
    )
"""


@pytest.fixture(autouse=True)
def _task() -> None:
    Path("my_task.py").write_text(TASK)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "evenstep", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp", "fsdp"))])
def test_each_is_evaluated_as_it_would_be_alone(strategy: str) -> None:
    expected = {}
    for name in ("clean", "noisy"):
        alone = evenstep.train(
            "my_task.py", options={"valid": name}, precision="fp64", name=name, progress=False, threads=1
        )
        expected |= {f"{name}/{value}": number for value, number in alone.evaluations[-1].values.items()}
    two = ("--strategy", strategy, "--devices", "cpu,cpu", "--precision", "fp64", "--name", "two")
    done = command("train", "my_task.py", *two)
    record = Record.read("runs/two")
    assert list(record.evaluations[-1].values) == list(expected)
    assert record.evaluations[-1].values == pytest.approx(expected, rel=1e-12)
    assert record.evaluations[-1].samples == 13 + 17
    assert record.summary is not None
    assert record.summary.best is not None
    assert record.summary.best.metric == "clean/loss"
    assert "valid noisy/accuracy" in " ".join(done.stdout.split())
    again = json.loads(command("evaluate", "runs/two", "--json").stdout)
    assert again["values"] == pytest.approx(expected, rel=1e-12)


def test_best_names_one_of_another_set_and_refuses_what_there_is_not() -> None:
    record = evenstep.train("my_task.py", best="noisy/accuracy", progress=False, threads=1)
    assert record.summary is not None
    assert record.summary.best is not None
    assert record.summary.best.metric == "noisy/accuracy"
    with pytest.raises(PlanError, match="--best is dirty/accuracy, and an evaluation has clean/loss, clean/accuracy"):
        evenstep.train("my_task.py", best="dirty/accuracy")


def test_a_dict_of_columns_is_one_set() -> None:
    columns = {"x": torch.zeros(3), "y": np.zeros(3)}
    assert validation_sets(columns) == {"": columns}
    assert validation_sets(None) == {}
    samples = {0: "a", 1: "b"}
    assert validation_sets(samples) == {"": samples}
