"""Options of a task: the parameters of its function, set as NAME=VALUE on a command line, in a plan and in Python."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import evenstep
from evenstep.errors import TaskError
from evenstep.plan import Plan, read_plan
from evenstep.record import Record
from evenstep.task import Task, call_task
from evenstep.task_options import parse_options, read_options
from evenstep.trackers.once_per_step import hyperparameters

TASK = '''
from __future__ import annotations
from pathlib import Path
from typing import Literal
import torch
from torch import nn
from evenstep import Task

x = torch.randn(24, 4)
activations = {"tanh": nn.Tanh, "relu": nn.ReLU}

def task(
    data: str = "here",
    *,
    lr: float = 0.1,
    width: int = 3,
    sizes: list[int] | None = None,
    kind: Literal["tanh", "relu"] = "tanh",
    is_wide: bool = False,
    start=0.5,
    where: Path = Path("a"),
) -> Task:
    """A small network.

    width: of its only layer
    """
    print(data, lr, width, sizes, kind, is_wide, start, repr(where), flush=True)
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, width), activations[kind](), nn.Linear(width, 1)),
        train=(x,),
        loss=lambda model, batch: (model(batch[0]) - start).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch=8,
    )
'''
GIVEN = ("lr=1", "width=5", "sizes=1,2", "kind=relu", "is_wide=yes", "start=0.25", "where=b/c")
PRINTED = "here 1.0 5 [1, 2] relu True 0.25 PosixPath('b/c')"
OPTIONS = {
    "lr": 1.0,
    "width": 5,
    "sizes": [1, 2],
    "kind": "relu",
    "is_wide": True,
    "start": 0.25,
    "where": "b/c",
}


@pytest.fixture(autouse=True)
def _task() -> None:
    Path("my_task.py").write_text(TASK)


def evenstep_(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_every_process_gets_them_and_the_plan_the_record_and_the_folder_name_them() -> None:
    done = evenstep_("train", "my_task.py", *GIVEN, "--strategy", "ddp", "--devices", "cpu,cpu")
    assert done.returncode == 0, done.stderr
    assert "options            lr=1.0, width=5, sizes=[1, 2], kind=relu, is_wide=True" in done.stderr
    (run,) = Path("runs").iterdir()
    assert run.name.endswith("-my_task-lr=1-width=5-sizes=1-2-kind=relu-is_wide=yes-start=0.25-where=b-c-ddp")
    assert [file.read_text().splitlines()[0] for file in sorted(run.glob("logs/*.out"))] == [PRINTED] * 2
    assert read_plan(run).options == OPTIONS
    assert Record.read(run).plan.options == OPTIONS
    page = evenstep_("report", str(run))
    assert "lr=1.0, width=5" in Path(page.stdout.strip()).read_text()


@pytest.mark.slow
def test_a_resumed_run_keeps_them_and_says_which_are_new() -> None:
    first = evenstep_("train", "my_task.py", "width=5", "start=0.25", "--name", "first")
    assert first.returncode == 0, first.stderr
    later = ("train", "--resume", "runs/first", "--epochs", "2")
    same = evenstep_(*later, "width=5", "kind=tanh", "--name", "same")
    assert same.returncode == 0, same.stderr
    assert "options changed" not in same.stderr
    done = evenstep_(*later, "start=0.75", "lr=0.5", "--name", "later")
    assert done.returncode == 0, done.stderr
    assert (
        "options changed: start=0.75 (was 0.25), lr=0.5 (was 0.1); "
        "weights, optimizer state and learning rate are still those of the checkpoint\n" in done.stderr
    )
    assert "the checkpoint's learning rate, 0.1, is kept; the one of this task's optimizer, 0.5, is not" in done.stderr
    assert read_plan("runs/later").options == {"width": 5, "start": 0.75, "lr": 0.5}


@pytest.mark.slow
def test_verify_takes_them() -> None:
    done = evenstep_("verify", "my_task.py", "width=2", "--strategies", "dp", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "here 0.1 2 None tanh" in done.stdout + done.stderr


def test_python_takes_them() -> None:
    record = evenstep.train("my_task.py", options={"width": 7}, devices=1, progress=False)
    assert record.plan.options == {"width": 7}


@pytest.mark.slow
def test_compare_takes_them() -> None:
    compared = ("--strategies", "dp", "--rounds", "1", "--steps", "2", "--name", "c", "--json")
    done = evenstep_("compare", "my_task.py", "width=2", *compared)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("runs/c/plan.json").read_text())["options"] == {"width": 2}


def test_help_begins_with_them_their_choices_defaults_and_the_docstring() -> None:
    shown = evenstep_("train", "my_task.py", "--help").stdout
    assert shown.startswith("Options of my_task.py:")
    assert "Usage: evenstep train" in shown
    assert "A small network." in shown
    words = [" ".join(line.split()) for line in shown.splitlines()]
    assert "lr= float default: 0.1" in words
    assert "kind= tanh | relu default: tanh" in words
    assert "is_wide= true | false default: false" in words
    assert "sizes= list[int] | none default: none" in words
    assert "start= float default: 0.5" in words


@pytest.mark.slow
def test_another_task_does_not_get_them() -> None:
    assert evenstep_("train", "my_task.py", "width=4", "--name", "first", "--steps", "1").returncode == 0
    Path("other.py").write_text(TASK.replace("width: int = 3", "size: int = 4").replace("width", "size"))
    done = evenstep_("train", "other.py", "--resume", "runs/first", "--steps", "2", "--name", "second")
    assert done.returncode == 0, done.stderr
    assert read_plan("runs/second").options == {}


@pytest.mark.slow
def test_a_copy_of_the_task_and_the_best_of_the_run_before() -> None:
    first = evenstep_("train", "my_task.py", "width=5", "start=0", "lr=0.5", "--epochs", "2", "--name", "first")
    assert first.returncode == 0, first.stderr
    Path("copy").mkdir()
    Path("copy/my_task.py").write_text(TASK)
    done = evenstep_("train", "copy/my_task.py", "--resume", "runs/first", "--epochs", "3", "--name", "later")
    assert done.returncode == 0, done.stderr
    assert "option of the earlier run: width=5" in done.stderr
    assert read_plan("runs/later").options == {"width": 5, "start": 0.0, "lr": 0.5}
    missing = evenstep_("evaluate", "runs/later/checkpoints/bset")
    assert "runs/later/checkpoints has no checkpoint bset; it has " in missing.stderr


def test_a_partial_is_a_task_too() -> None:
    def task(width: int) -> Task:
        raise TaskError(f"width is {width}")

    with pytest.raises(TaskError, match="width is 5"):
        call_task(partial(task, width=5))


def test_help_with_a_device_imports_nothing() -> None:
    done = evenstep_("train", "--devices", "cuda:0", "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_parameter_without_a_default_is_needed() -> None:
    def task(width: int) -> Task:
        raise AssertionError(width)

    with pytest.raises(TaskError, match=r"task\(\) needs width; write width=\.\.\."):
        call_task(task)


def test_values_go_through_a_plan_and_to_trackers() -> None:
    plan = Plan(batch=1, epochs=1, options=OPTIONS)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert hyperparameters(plan)["width"] == 5
    assert "options" not in hyperparameters(plan)
    assert "options" not in Plan(batch=1, epochs=1).describe()


def test_what_no_text_can_say_is_refused_by_name() -> None:
    def task(model: Task) -> Task:
        return model

    with pytest.raises(TaskError, match="model cannot be given on a command line"):
        read_options(task, parse_options(["model=net"]))
