"""A file of settings, the folder of runs, names of runs, and how much is shown: through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import evenstep
from evenstep.plan import read_plan
from evenstep.record import Record

TASK = """
import torch
from torch import nn
from evenstep import Task

x = torch.randn(24, 4)

def task(data: str = "", *, lr: float = 0.1, width: int = 3, sizes: list[int] = [1]) -> Task:
    print("task:", data, lr, width, sizes, flush=True)
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1)),
        train=(x,),
        valid=(x,),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch=8,
    )

def small(width: int = 2) -> Task:
    return task(width=width)
"""
SETTINGS = """
task = "my_task.py"
devices = ["cpu", "cpu"]
strategy = "ddp"
batch = 12
checkpoint_every = 1
audit = true
clip = 1

[options]
lr = 0.5
width = 5
sizes = [1, 2]
"""


@pytest.fixture(autouse=True)
def _files() -> None:
    Path("my_task.py").write_text(TASK)
    Path("run.toml").write_text(SETTINGS)


def evenstep_(*arguments: str, cwd: str | Path = ".") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_a_file_sets_options_of_the_command_and_of_the_task_and_the_command_line_wins() -> None:
    done = evenstep_("train", "--config", "run.toml", "width=7", "--batch", "6", "--name", "first")
    assert done.returncode == 0, done.stderr
    plan = read_plan("runs/first")
    assert plan.options == {"lr": 0.5, "width": 7, "sizes": [1, 2]}
    assert (plan.strategy, plan.devices, plan.batch, plan.checkpoint_every) == ("ddp", ("cpu", "cpu"), 6, 1)
    assert (plan.audit, plan.clip) == (True, 1.0)
    verified = evenstep_("verify", "lr=0.1", "--config", "verify.toml")
    assert "verify.toml does not exist" in verified.stderr
    Path("verify.toml").write_text('task = "my_task.py"\nstrategies = "dp"\nsteps = 1\n[options]\nwidth = 4\n')
    verified = evenstep_("verify", "lr=0.25", "--config", "verify.toml", "--quiet")
    assert verified.returncode == 0, verified.stderr
    assert "task:  0.25 4 [1]" in verified.stdout + verified.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "batsh = 3",
            "run.toml: evenstep train has no option batsh; did you mean batch? Options of the task stand below",
        ),
        ("lr = 3", "run.toml: evenstep train has no option lr; options of the task stand below [options]"),
        ("batch = 1.5", "run.toml: batch is 1.5; expected int, got float"),
        ("batch = true", "run.toml: batch is True; expected int, got bool"),
        ('audit = "yes"', "run.toml: audit is 'yes'; write true or false"),
        ("allow-pickle = true", "run.toml: allow-pickle cannot be set in a file; write --allow-pickle on the command"),
        ("seed = -4", "seed is -4; it must be from 0 to 2**63 - 1"),
        ("[options]\nwidht = 4", "task() has no option widht; did you mean width?"),
        ("options = 4", "run.toml: options is 4; write [options], and below it lr = 0.1"),
        ("task = 4", "run.toml: task is 4; write a text"),
        ("batch = ,", "run.toml is not TOML: Invalid value (at line 1, column 9)"),
        ('name = "a\\u001bb"', "'a\\x1bb' in run.toml holds a control character"),
    ],
)
def test_a_wrong_key_or_value_is_refused_in_one_line_and_nothing_is_left(text: str, said: str) -> None:
    Path("run.toml").write_text(text)
    done = evenstep_("train", "my_task.py", "--config", "run.toml", "--devices", "1")
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not Path("runs").exists()


def test_a_task_that_a_file_names_outside_the_working_folder_is_not_imported() -> None:
    Path("here").mkdir()
    Path("here/run.toml").write_text(f'task = "{Path("my_task.py").resolve()}"')
    done = evenstep_("train", "--config", "run.toml", cwd="here")
    assert done.returncode == 2
    assert f"evenstep train {Path('my_task.py').resolve()} --config run.toml" in done.stderr
    verified = evenstep_("verify", "--config", "run.toml", cwd="here")
    assert f"evenstep verify {Path('my_task.py').resolve()} --config run.toml" in verified.stderr


def test_runs_go_where_out_says_and_a_resume_works_from_another_folder() -> None:
    Path("data").mkdir()
    out = ("--out", "some/where")
    done = evenstep_("train", "my_task.py", "width=4", "--data", "data", *out, "--json")
    assert done.returncode == 0, done.stderr
    (run,) = Path("some/where").iterdir()
    assert not Path("runs").exists()
    summary = json.loads(done.stdout.splitlines()[-1])
    assert Path(summary["run"]) == run
    assert Path(summary["checkpoint"]).is_dir()
    assert read_plan(run).task == str(Path("my_task.py").resolve())
    above = Path.cwd().parent
    resumed = evenstep_("train", "--resume", str(run.resolve()), "--epochs", "2", *out, cwd=above)
    assert resumed.returncode == 0, resumed.stderr
    (later,) = (above / "some/where").iterdir()
    assert Record.read(later).plan.data == str(Path("data").resolve())
    assert [step.step for step in Record.read(later).steps] == [4, 5, 6]


@pytest.mark.slow
def test_a_resumed_run_lies_beside_the_run_before_and_its_best_is_found_from_anywhere() -> None:
    # The largest loss is that of the first epoch.
    words = ("--best", "loss:max", "--out", "some/where", "--name", "first", "--epochs", "2")
    first = evenstep_("train", "my_task.py", *words)
    assert first.returncode == 0, first.stderr
    for name, cwd in (("second", Path.cwd().parent), ("third", Path.cwd())):
        before = Path("some/where", "first" if name == "second" else "second").resolve()
        words = ("--resume", str(before), "--epochs", "3" if name == "second" else "4", "--name", name)
        resumed = evenstep_("train", *words, cwd=cwd)
        assert resumed.returncode == 0, resumed.stderr
    third = Record.read("some/where/third")
    best = third.summary and third.summary.best
    assert best is not None
    assert best.checkpoint == "some/where/first/checkpoints/step-00000003"
    assert Path("some/where/third/checkpoints/best").resolve() == Path(best.checkpoint).resolve()
    evaluated = evenstep_("evaluate", "some/where/third/checkpoints/best", "--json").stdout
    values = json.loads(evaluated.splitlines()[-1])["values"]
    assert values == pytest.approx(best.values)
    exported = evenstep_("checkpoint", "export", "some/where/third/checkpoints/best", "exported", "--to", "torch")
    assert exported.returncode == 0, exported.stderr
    shutil.rmtree("some/where/first")
    gone = evenstep_("evaluate", "some/where/third/checkpoints/best")
    assert gone.returncode == 2
    assert "first/checkpoints/step-00000003, which was moved or deleted" in gone.stderr


@pytest.mark.slow
def test_a_resume_from_a_folder_beside_it_gives_the_command_that_works() -> None:
    assert evenstep_("train", "my_task.py", "--name", "first").returncode == 0
    Path("beside").mkdir()
    refused = evenstep_("train", "--resume", "../runs/first", "--epochs", "2", cwd="beside")
    assert refused.returncode == 2
    command = refused.stderr.splitlines()[-1].partition("evenstep ")[2].split()
    resumed = evenstep_(*command, "--epochs", "2", "--name", "second", cwd="beside")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.slow
def test_a_project_that_was_moved_is_resumed_with_its_options() -> None:
    Path("old").mkdir()
    Path("my_task.py").rename("old/my_task.py")
    assert evenstep_("train", "my_task.py", "width=4", "--name", "first", cwd="old").returncode == 0
    Path("old").rename("new")
    for task in ((), ("my_task.py",)):
        resumed = evenstep_("train", *task, "--resume", "runs/first", "--epochs", "2", cwd="new")
        assert resumed.returncode == 0, resumed.stderr
        assert "options            width=4" in resumed.stderr


@pytest.mark.slow
def test_a_run_is_named_after_file_function_and_options() -> None:
    for words in (("my_task.py:small", "width=1"), ("my_task.py",), ("my_task.py:task", "lr=0.2")):
        assert evenstep_("train", *words, "--steps", "1").returncode == 0
    names = sorted(name.split("-", 3)[3] for name in os.listdir("runs"))
    assert names == ["my_task-lr=0.2-single", "my_task-single", "my_task-small-width=1-single"]
    long = evenstep_("train", "my_task.py", f"sizes={','.join(['123456'] * 40)}", "--steps", "1")
    assert long.returncode == 0, long.stderr


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp", marks=pytest.mark.slow)])
def test_quiet_shows_messages_and_the_result_alone(strategy: str) -> None:
    devices = "cpu,cpu" if strategy == "ddp" else "cpu"
    done = evenstep_("train", "my_task.py", "--strategy", strategy, "--devices", devices, "-q")
    assert done.returncode == 0
    assert done.stderr in ("", "task:  0.1 3 [1]\n")
    assert "valid loss" in done.stdout
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []
    wrong = evenstep_("train", "my_task.py", "width=0.5", "-q")
    assert wrong.stderr.startswith("error: width is '0.5'")


def test_python_is_quiet_too_and_help_has_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    evenstep.train("my_task.py", quiet=True, devices=1)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("task:  0.1 3 [1]\n", "")
    shown = " ".join(evenstep_("--help").stdout.split())
    assert "2 bad input: nothing was started 75 stopped by SIGTERM" in shown
