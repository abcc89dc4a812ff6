"""Evaluations every few steps, the best of them by any metric, and early stopping; also after a kill and a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import evenstep
from evenstep.errors import PlanError
from evenstep.record import Record
from tests.waiting import wait_until

TASK = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from evenstep import Task

class Rising(nn.Module):
    # After each step, every weight is greater by 1.
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
            disturb(int(self.calls))
        return self.weights.sum() + 0 * x[:, 0]

def disturb(step):
    mark = Path("disturbed")
    if step == int(os.environ.get("KILLED_AT", 0)) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if step == int(os.environ.get("PAUSED_AT", 0)) and not mark.exists():
        mark.touch()
        time.sleep(2)

def metrics(model, batch):
    height = model(batch[0]) / 4
    if int(height[0]) == int(os.environ.get("EVALUATED_SLOWLY_AT", -1)) and not Path("disturbed").exists():
        Path("disturbed").touch()
        time.sleep(2)
    return {"score": -(height - 7) ** 2 + 0.01 * batch[0][:, 0], "error": (height - 7) ** 2}

def show(model):
    if os.environ.get("KILLED_AT_THE_END") and not Path("disturbed").exists():
        Path("disturbed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "shown"

def task() -> Task:
    x = torch.arange(1, 25.0)[:, None]
    return Task(
        model=Rising,
        train=(x,),
        valid=(x[:11],),
        loss=lambda model, batch: -model(batch[0]).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        metrics=metrics,
        show=show,
        batch=6,
        epochs=9,
    )
"""
OFTEN = ("--evaluate-every", "3", "--evaluate-first", "--best", "score:max", "--stop-after", "3", "--precision", "fp64")
STEPS = [0, 3, 6, 9, 12, 15]
"""The score rises until step 7, so that of step 6 is the best, and three evaluations later the run ends."""


@pytest.fixture(autouse=True)
def _task() -> None:
    Path("my_task.py").write_text(TASK)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "evenstep", *arguments]


def train(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = command("train", "my_task.py", "--name", name, *arguments)
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def trained(name: str, *arguments: str, **environment: str) -> Record:
    done = train(name, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return Record.read(Path("runs") / name)


def values(record: Record) -> dict[int, dict[str, float]]:
    return {one.step: one.values for one in record.evaluations}


def two(strategy: str) -> tuple[str, ...]:
    return ("--strategy", strategy, "--devices", "cpu,cpu")


@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp", "fsdp"))])
def test_two_devices_evaluate_and_stop_where_one_does(strategy: str) -> None:
    one, other = trained("one", *OFTEN), trained("other", *OFTEN, *two(strategy))
    for record in (one, other):
        assert [evaluation.step for evaluation in record.evaluations] == STEPS
        assert len(record.steps) == 15
        assert record.summary is not None
        assert record.summary.best is not None
        assert (record.summary.best.metric, record.summary.best.step) == ("score", 6)
        assert record.summary.stopped == "no better score in 3 evaluations (best -0.9400 at step 6)"
        assert Path(record.summary.best.checkpoint).is_dir()
        link = Path(record.summary.run) / "checkpoints" / "best"
        assert link.resolve() == Path(record.summary.best.checkpoint).resolve()
    for step, expected in values(one).items():
        assert values(other)[step] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [(), two("ddp")], ids=["single", "ddp"])
def test_a_killed_run_goes_on_and_decides_as_one_that_was_not(strategy: tuple[str, ...]) -> None:
    whole = trained("whole", *OFTEN, *strategy)
    # The checkpoint before the kill is that of the best evaluation; two later evaluations are made again.
    killed = trained("killed", *OFTEN, *strategy, "--restarts", "1", "--checkpoint-every", "5", KILLED_AT="14")
    assert len(killed.restarts) == 1
    assert values(killed) == values(whole)
    assert killed.losses == whole.losses
    assert killed.summary is not None
    assert whole.summary is not None
    assert killed.summary.stopped == whole.summary.stopped
    assert killed.summary.best is not None
    assert killed.summary.best.step == 6


def preempted(name: str, *arguments: str, **environment: str) -> None:
    """SIGTERM while the task waits."""
    words = command("train", "my_task.py", "--name", name, *arguments)
    with subprocess.Popen(words, stderr=subprocess.PIPE, env={**os.environ, **environment}) as process:
        wait_until(lambda: Path("disturbed").exists())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
        assert process.stderr is not None
        process.stderr.read()


@pytest.mark.slow
def test_a_run_that_stopped_early_and_was_killed_before_its_end_only_ends() -> None:
    killed = trained("killed", *OFTEN, "--restarts", "1", KILLED_AT_THE_END="yes")
    assert len(killed.restarts) == 1
    assert [one.step for one in killed.evaluations] == STEPS
    assert len(killed.steps) == 15
    assert killed.summary is not None
    assert killed.summary.stopped == "no better score in 3 evaluations (best -0.9400 at step 6)"
    assert killed.summary.shown == "shown"


@pytest.mark.slow
def test_an_evaluation_that_was_interrupted_is_made_by_the_run_that_resumes() -> None:
    # Ranks agree on a stop every eight batches of an evaluation.
    Path("my_task.py").write_text(TASK.replace("valid=(x[:11],)", "valid=(x.repeat(6, 1),)"))
    whole = trained("whole", *OFTEN, *two("ddp"))
    preempted("first", *OFTEN, *two("ddp"), EVALUATED_SLOWLY_AT="9")
    assert [one.step for one in Record.read("runs/first").evaluations] == [0, 3, 6]
    assert [step.step for step in Record.read("runs/first").steps] == list(range(1, 10))
    done = subprocess.run(
        command("train", "--resume", "runs/first", "--name", "second"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    second = Record.read("runs/second")
    assert [(one.step, one.epoch) for one in second.evaluations] == [(9, 2), (12, 2), (15, 3)]
    assert values(second) == {step: of_step for step, of_step in values(whole).items() if step > 6}
    assert second.summary is not None
    assert whole.summary is not None
    assert second.summary.stopped == whole.summary.stopped


@pytest.mark.slow
def test_a_preempted_run_is_resumed_in_another_folder_and_still_knows_the_best() -> None:
    preempted("first", *OFTEN, *two("ddp"), PAUSED_AT="10")
    done = subprocess.run(
        command("train", "--resume", "runs/first", "--name", "second", "--json"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["best"]["step"] == 6
    assert summary["best"]["checkpoint"] == "runs/first/checkpoints/step-00000006"
    assert summary["stopped"] == "no better score in 3 evaluations (best -0.9400 at step 6)"
    record = Record.read("runs/second")
    assert record.steps[-1].step == 15
    # What has stopped early has nothing left to do, unless more patience is given.
    again = train("third", "--resume", "runs/second")
    assert again.returncode == 2
    assert "is where the run stopped early: no better score in 3 evaluations" in again.stderr
    assert "give a larger --stop-after to continue" in again.stderr
    further = trained("further", "--resume", "runs/second", "--stop-after", "4")
    assert further.steps[-1].step == 18


def test_lines_and_summary_name_the_train_loss_and_the_best_beside_the_last() -> None:
    done = train("mine", "--best", "error", "--epochs", "3")
    assert "epoch 2  step 8  train loss -22.0000  valid: loss -32.0000  score -0.9400  error 1.0000" in done.stderr
    said = " ".join(done.stdout.split())
    assert "valid error 25.0000" in said
    assert "best error 1.0000 at step 8, runs/mine/checkpoints/step-00000008" in said
    page = subprocess.run(command("report", "runs/mine"), capture_output=True, text=True, timeout=120, check=True)
    assert "ended; best error 1.0000 at step 8" in Path(page.stdout.strip()).read_text()
    Path("my_task.py").write_text(TASK.replace("valid=(x[:11],),", ""))
    done = train("plain", "--epochs", "2")
    assert "epoch 1  step 4  train loss -6.0000\n" in done.stderr
    assert [one.train_loss for one in Record.read("runs/plain").epochs] == [-6.0, -22.0]


@pytest.mark.slow
def test_without_a_flag_the_least_loss_of_the_epochs_is_the_best() -> None:
    record = trained("mine")
    assert [one.step for one in record.evaluations] == list(range(4, 37, 4))
    assert record.summary is not None
    assert record.summary.best is not None
    assert (record.summary.best.metric, record.summary.best.step) == ("loss", 36)
    assert record.summary.stopped is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"best": "score"}, "is a larger score better, or a smaller one? Write --best score:max or --best score:min"),
        ({"best": "accuracy"}, "--best is accuracy, and an evaluation has loss, score, error; choose one of these"),
        ({"best": "scor"}, "--best is scor, and an evaluation has loss, score, error; did you mean score?"),
        ({"stop_after": 0}, "stop-after is 0; it must be a whole number, 1 or more"),
        ({"evaluate_every": -1}, "evaluate-every is -1; it must be a whole number, 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        evenstep.train("my_task.py", **given)
    assert said in str(error.value)
    assert not Path("runs").exists()


def test_without_valid_there_is_nothing_to_evaluate() -> None:
    Path("my_task.py").write_text(TASK.replace("valid=(x[:11],),", ""))
    done = train("mine", "--stop-after", "2")
    assert done.returncode == 2
    assert (
        "--stop-after needs data to evaluate on, and the task has none; give it: Task(..., valid=data)" in done.stderr
    )
