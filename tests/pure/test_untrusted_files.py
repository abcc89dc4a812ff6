"""Files of somebody else that name code: it is imported, or unpickled, where the user asked for it and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import evenstep as library
from evenstep.checkpoint import files
from tests.pure.conftest import Ended
from tests.pure.test_bad_input import WEIGHTS, Malicious, rewrite, task_text, write_task

STOLEN = f"{task_text()}\nimport os; os.makedirs('it-ran', exist_ok=True)\n"


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file outside the working folder, which says when it is imported."""
    file = tmp_path_factory.mktemp("elsewhere") / "stolen.py"
    file.write_text(STOLEN)
    return file


@pytest.fixture
def run() -> Path:
    """A run of a few steps in the working folder."""
    write_task()
    library.train("my_task.py", steps=2, name="first", progress=False)
    return Path("runs/first")


def name_in_checkpoint(run: Path, task: str) -> list[str]:
    path = run / "checkpoints/step-00000002/state.json"
    state = json.loads(path.read_text())
    state["plan"]["task"] = task
    rewrite(run, files.STATE, json.dumps(state).encode())
    return ["--resume", str(run)]


def name_in_plan(run: Path, task: str) -> list[str]:
    return write_plan(run, task=task)


def write_plan(run: Path, **changes: Any) -> list[str]:
    values = {**json.loads((run / "plan.json").read_text()), **changes}
    Path("plan.json").write_text(json.dumps(values))
    return ["--plan", "plan.json"]


@pytest.mark.parametrize("name", [name_in_checkpoint, name_in_plan])
@pytest.mark.parametrize("how", ["file", "link", "module"])
def test_what_lies_outside_the_working_folder_is_not_imported(
    evenstep: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    run: Path,
    elsewhere: Path,
    name: Callable[[Path, str], list[str]],
    how: str,
) -> None:
    monkeypatch.syspath_prepend(elsewhere.parent)
    monkeypatch.delitem(sys.modules, "stolen", raising=False)
    os.symlink(elsewhere, "link.py")
    task = {"file": f"{elsewhere}:task", "link": "link.py", "module": "stolen:task"}[how]
    command = ["train", *name(run, task), "--steps", "4", "--name", "second"]
    ended = evenstep(*command)
    assert ended.code == 2
    assert f"names the task {task}, which is not in this folder: importing it runs it." in ended.err
    assert f"If you trust it, name it yourself: evenstep train {task} " in ended.err
    assert not Path("it-ran").exists()
    assert not Path("runs/second").exists()
    asked_for = evenstep("train", task, *command[1:])
    assert asked_for.code == 0, asked_for.err
    assert Path("it-ran").exists()


@pytest.mark.parametrize("where", [".venv/lib/python3.11/site-packages", ".venv/share"])
def test_what_is_installed_in_the_working_folder_is_not_imported(
    evenstep: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, run: Path, where: str
) -> None:
    Path(where).mkdir(parents=True)
    (Path(where) / "installed.py").write_text(STOLEN)
    monkeypatch.syspath_prepend(Path(where).resolve())
    monkeypatch.setattr(sys, "prefix", str(Path(".venv").resolve()))
    ended = evenstep("train", *name_in_plan(run, "installed:task"), "--steps", "4", "--name", "second")
    assert ended.code == 2
    assert "names the task installed:task, which is an installed package: importing it runs it." in ended.err
    assert not Path("it-ran").exists()


@pytest.mark.parametrize("name", [name_in_checkpoint, name_in_plan])
def test_what_lies_in_the_working_folder_is_said_and_imported(
    evenstep: Callable[..., Ended], run: Path, name: Callable[[Path, str], list[str]]
) -> None:
    words = name(run, "my_task.py")
    ended = evenstep("train", *words, "--steps", "4", "--name", "second")
    assert ended.code == 0, ended.err
    assert ended.err.startswith(f"importing {Path('my_task.py').resolve()}, which {words[1]} names\n")


def test_a_plan_does_not_switch_pickle_on(evenstep: Callable[..., Ended], run: Path) -> None:
    torch.save({**WEIGHTS, "more": Malicious()}, "evil.pt")
    words = write_plan(run, allow_pickle=True, resume=str(Path("evil.pt").resolve()))
    ended = evenstep("train", "my_task.py", *words, "--name", "second")
    assert ended.code == 2
    assert "evil.pt holds Python objects, which can run code when loaded" in ended.err
    assert not Path("it-ran").exists()


def test_a_checkpoint_does_not_switch_pickle_on(evenstep: Callable[..., Ended], run: Path) -> None:
    state = json.loads((run / "checkpoints/step-00000002/state.json").read_text())
    state["plan"]["allow_pickle"] = True
    rewrite(run, files.STATE, json.dumps(state).encode())
    assert evenstep("train", "my_task.py", "--resume", run, "--steps", "3", "--name", "second").code == 0
    assert json.loads(Path("runs/second/plan.json").read_text())["allow_pickle"] is False


def test_a_plan_goes_on_from_elsewhere_only_where_that_is_asked_for(
    evenstep: Callable[..., Ended], run: Path, elsewhere: Path
) -> None:
    torch.save(WEIGHTS, elsewhere.parent / "weights.pt")
    weights = str(elsewhere.parent / "weights.pt")
    words = ["train", "my_task.py", *write_plan(run, resume=weights), "--name", "second"]
    ended = evenstep(*words)
    assert ended.code == 2
    assert f"plan.json resumes from {weights}, which is not in this folder." in ended.err
    assert evenstep(*words, "--resume", weights).code == 0
    shutil.rmtree("runs/second")
