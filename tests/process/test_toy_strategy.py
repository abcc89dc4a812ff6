"""A new strategy is one file and one row: train, verify and compare run it in real processes, by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STRATEGY = """
from contextlib import contextmanager, nullcontext

import torch.distributed as dist

from evenstep.strategies.base import DistributedModel, LossModule


class Toy:
    def wrap(self, model, world, sample=None):
        model.to(world.device)
        return ToyModel(model, world)


class ToyModel(DistributedModel):
    def __init__(self, model, world):
        super().__init__(model, [LossModule(model)])
        self._world = world

    def sync_gradients(self, is_last):
        return self._averaging() if is_last else nullcontext()

    @contextmanager
    def _averaging(self):
        yield
        if self._world.size > 1 and not self._world.communication.is_off:
            for weight in self.weights:
                dist.all_reduce(weight.grad)
                weight.grad /= self._world.size * {factor}
"""
TASK = """
from evenstep.strategy_facts import StrategyFacts, add_strategy
from evenstep.tasks.digits import task

add_strategy(
    StrategyFacts(
        name="toy",
        location="toy_strategy:Toy",
        summary="one all-reduce for each gradient, after backward",
        processes_per_device=True,
        refusals={"compile": "toy does not compile; use --strategy ddp"},
    )
)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy_strategy.py").write_text(STRATEGY.replace("{factor}", "1"))
    (tmp_path / "my_task.py").write_text(TASK)
    return tmp_path


def evenstep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_train_runs_it_in_two_processes(folder: Path) -> None:
    done = evenstep(folder, "train", "my_task.py", "--strategy", "toy", "--devices", "cpu,cpu", "--steps", "4")
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "plan.json").read_text())["strategy"] == "toy"


@pytest.mark.slow
def test_its_run_is_reported_and_resumed_with_and_without_naming_the_task(folder: Path) -> None:
    options = ("--strategy", "toy", "--devices", "cpu,cpu", "--steps", "4", "--name", "first")
    assert evenstep(folder, "train", "my_task.py", *options).returncode == 0
    done = evenstep(folder, "report", "runs/first")
    assert done.returncode == 0, done.stderr
    for task in (["my_task.py"], []):
        done = evenstep(folder, "train", *task, "--resume", "runs/first", "--steps", "6", "--json")
        assert done.returncode == 0, done.stderr
        assert (json.loads(done.stdout)["strategy"], json.loads(done.stdout)["steps"]) == ("toy", 2)
    (folder / "my_task.py").write_text("from evenstep.tasks.digits import task\n")
    done = evenstep(folder, "train", "--resume", "runs/first", "--steps", "6")
    assert (done.returncode, "unknown strategy 'toy'" in done.stderr) == (2, True)


@pytest.mark.slow
def test_verify_finds_that_it_learns_what_one_device_learns(folder: Path) -> None:
    done = evenstep(folder, "verify", "my_task.py", "--strategies", "toy", "--devices", "cpu,cpu", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["is_same"]


@pytest.mark.slow
def test_verify_finds_its_mistake(folder: Path) -> None:
    (folder / "toy_strategy.py").write_text(STRATEGY.replace("{factor}", "2"))
    done = evenstep(folder, "verify", "my_task.py", "--strategies", "toy", "--devices", "cpu,cpu")
    assert done.returncode == 1, done.stdout + done.stderr


@pytest.mark.slow
def test_compare_measures_it_beside_the_others(folder: Path) -> None:
    how = ("--strategies", "toy", "--devices", "1,2", "--rounds", "1", "--steps", "4", "--json")
    done = evenstep(folder, "compare", "my_task.py", *how)
    assert done.returncode == 0, done.stderr
    rows = {(row["strategy"], len(row["devices"])): row["parity"] for row in json.loads(done.stdout)["rows"]}
    assert rows["toy", 2] == "same"


@pytest.mark.slow
def test_what_its_row_refuses_and_an_unknown_name_are_refused_before_anything_starts(folder: Path) -> None:
    done = evenstep(folder, "train", "my_task.py", "--strategy", "toy", "--compile", "--steps", "1")
    assert (done.returncode, "toy does not compile; use --strategy ddp" in done.stderr) == (2, True)
    done = evenstep(folder, "train", "my_task.py", "--strategy", "toi", "--steps", "1")
    assert done.returncode == 2
    assert (
        "unknown strategy 'toi'; choose single, dp, ddp, fsdp, tensor, pipeline, dp-torch or toy; did you mean toy?"
        in done.stderr
    )
    assert not (folder / "runs").exists()
