"""What the user's code does to the process that it runs in: end it, move it to another folder, stop an iteration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evenstep.launcher.failure import cause
from evenstep.record import Record
from evenstep.worker.main import write_report
from tests.pure.conftest import Ended

TASK = """
import os, sys, torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, id_):
        pass  # sample
        return torch.full((4,), float(id_)), id_ % 2

def model():
    pass  # model
    return nn.Linear(4, 2)

def loss(model, batch):
    pass  # loss
    return F.cross_entropy(model(batch[0]), batch[1])

def task() -> Task:
    pass  # task
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.0)
    return Task(model=model, train=Samples(), loss=loss, optimizer=optimizer, batch=4)
"""


def write_task(where: str, line: str) -> int:
    """The task with a line of code in this place; its number."""
    text = TASK.replace(f"pass  # {where}", line)
    Path("my_task.py").write_text(text)
    return next(number for number, one in enumerate(text.splitlines(), 1) if one.strip() == line)


@pytest.mark.parametrize("where", ["sample", "model", "loss", "task"])
def test_an_exit_before_the_first_step_is_no_good_end(where: str, evenstep: Callable[..., Ended]) -> None:  # 36
    number = write_task(where, "sys.exit(0)")
    ended = evenstep("train", "my_task.py")
    assert ended.code == 2
    assert "SystemExit: 0" in ended.err
    assert f"my_task.py:{number}" in ended.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("where", ["task", "model", "loss"])
def test_a_task_that_goes_to_another_folder_leaves_its_run_here(where: str, evenstep: Callable[..., Ended]) -> None:
    Path("elsewhere").mkdir()  # 36
    write_task(where, f"os.chdir({str(Path('elsewhere').absolute())!r})")
    here = os.getcwd()
    ended = evenstep("train", "my_task.py", "--name", "one", "--json")
    assert ended.code == 0, ended.err
    assert os.getcwd() == here
    summary = Record.read("runs/one").summary
    assert summary is not None
    assert (summary.run, summary.checkpoint) == ("runs/one", "runs/one/checkpoints/step-00000003")
    assert list(Path("elsewhere").iterdir()) == []


def test_a_relative_folder_that_a_task_goes_to_is_still_its_own_while_it_trains(evenstep: Callable[..., Ended]) -> None:
    Path("data").mkdir()  # 36
    Path("data/scale").touch()
    Path("my_task.py").write_text(
        TASK.replace("pass  # task", "os.chdir('data')").replace("pass  # sample", "os.stat('scale')")
    )
    ended = evenstep("train", "my_task.py", "--name", "one")
    assert ended.code == 0, ended.err


def test_a_stop_iteration_is_told_with_its_own_line(tmp_path: Path) -> None:  # 36
    def users() -> None:
        next(iter([]))

    def ours() -> Iterator[None]:
        yield users()

    try:
        list(ours())
    except RuntimeError as error:
        write_report(tmp_path, 0, error)
    found = cause(tmp_path, {0: 1}, {})
    assert found.details[-2].endswith("in users: next(iter([]))")
    assert found.details[-1] == "StopIteration"
