"""`evenstep evaluate`: a checkpoint gives what its run recorded, under any strategy; and other values on other data."""

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
from evenstep.record import Record
from tests.marks import first_is_quick

TASK = """
import json
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

def predict(model, batch):
    return model(batch[0])[:, 1], batch[1]

def task(data: str = "small", classes: int = 2, ema: float | None = None) -> Task:
    num = json.loads(Path(data, "num.json").read_text())
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(num))
    y = (x[:, 0] > 0).long()
    return Task(
        model=lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, classes)),
        train=(x, y),
        valid=(x[:23], y[:23]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        predict=predict,
        scores={"gap": lambda predictions, targets: predictions[targets == 1].mean() - predictions.median()},
        batch=10,
        epochs=3,
        ema=ema,
    )
"""


@pytest.fixture(autouse=True)
def _run() -> None:
    Path("my_task.py").write_text(TASK)
    for name, num in (("small", 40), ("other", 21)):
        Path(name).mkdir()
        Path(name, "num.json").write_text(str(num))
    evenstep.train("my_task.py", name="mine", precision="fp64", keep=9, progress=False, threads=1)


def evaluate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", "evaluate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def evaluated(*arguments: str) -> dict[str, Any]:
    done = evaluate(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert [run.name for run in Path("runs").iterdir()] == ["mine"]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


STRATEGIES = ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("single", "dp", "fsdp"))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_gives_what_its_run_recorded(strategy: str) -> None:
    devices = "cpu" if strategy == "single" else "cpu,cpu"
    recorded = {one.step: one.values for one in Record.read("runs/mine").evaluations}
    newest = evaluated("runs/mine", "--strategy", strategy, "--devices", devices)
    assert (newest["step"], newest["samples"]) == (12, 23)
    assert newest["checkpoint"] == "runs/mine/checkpoints/step-00000012"
    assert newest["values"] == pytest.approx(recorded[12], rel=1e-12)
    first = evaluated("runs/mine/checkpoints/step-00000004", "--strategy", strategy, "--devices", devices)
    assert first["values"] == pytest.approx(recorded[4], rel=1e-12)


def test_a_file_sets_what_is_evaluated_and_quiet_shows_the_result_alone() -> None:
    Path("test.toml").write_text('task = "my_task.py"\ndata = "other"\nbatch = 7\n')
    done = evaluate("runs/mine", "--config", "test.toml", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert "evaluated 21 samples in" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_the_average_of_the_weights_is_evaluated_if_the_run_has_one() -> None:
    record = evenstep.train("my_task.py", name="averaged", options={"ema": 0.9}, progress=False, threads=1)
    done = evaluate("runs/averaged", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["values"] == pytest.approx(record.evaluations[-1].values, rel=1e-5)


TWO_MODELS = """
import torch
from torch import nn
from evenstep import Task

x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))

def task() -> Task:
    return Task(
        model=lambda: {"a": nn.Linear(3, 2), "b": nn.Linear(2, 3)},
        train=x,
        valid=x[:11],
        loss={
            "b": lambda models, batch: (models.b(models.a(batch)) - batch).square().mean(),
            "a": lambda models, batch: models.a(batch).square().mean(),
        },
        optimizer={key: lambda parameters: torch.optim.SGD(parameters, lr=0.1) for key in ("b", "a")},
        batch=10,
    )
"""


@pytest.mark.slow
def test_several_models_are_evaluated_together() -> None:
    Path("two_models.py").write_text(TWO_MODELS)
    record = evenstep.train("two_models.py", name="two", precision="fp64", progress=False, threads=1)
    done = evaluate("runs/two", "--json", "--strategy", "ddp", "--devices", "cpu,cpu")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["values"] == pytest.approx(record.evaluations[-1].values, rel=1e-12)


@pytest.mark.slow
def test_other_data_gives_other_values_and_the_table_names_them() -> None:
    done = evaluate("runs/mine/checkpoints/best", "my_task.py", "--data", "other")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "evaluated 21 samples in" in said
    assert "valid accuracy" in said
    assert "valid gap" in said


@pytest.mark.slow
def test_what_was_best_in_the_run_need_not_be_in_the_evaluation() -> None:
    sets = TASK.replace("valid=(x[:23], y[:23])", 'valid={"first": (x[:23], y[:23]), "rest": (x[23:], y[23:])}')
    Path("sets.py").write_text(sets)
    evenstep.train("sets.py", name="sets", best="rest/accuracy", progress=False, threads=1)
    done = evaluate("runs/sets", "my_task.py", "--json")
    assert done.returncode == 0, done.stderr
    assert "accuracy" in json.loads(done.stdout)["values"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    first_is_quick(
        [
            (("runs/none",), "runs/none does not exist; give a run folder"),
            (("custom",), "was saved by a custom loop, which has no Task to evaluate; call team.evaluate in that loop"),
            (("runs/mine", "classes=3"), "is from another model: 3.weight has shape (2, 4) instead of (3, 4)"),
            (("runs/mine", "size=3"), "task() has no option size"),
        ]
    ),
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    team = evenstep.join("single", devices=("cpu",))
    model = team.wrap(nn.Linear(2, 1))
    loader = team.loader(torch.zeros(4, 2), batch=2)
    evenstep.Run(team, model, torch.optim.SGD(model.parameters(), lr=0.1), loader).save("custom")
    done = evaluate(*arguments)
    assert done.returncode == 2
    assert said in done.stderr, done.stderr
