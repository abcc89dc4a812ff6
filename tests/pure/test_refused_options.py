"""Options of a task, and of torchrun, that are refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from torch.distributed.run import get_args_parser

from evenstep.cli import app
from evenstep.cli.run import HiddenTorchrunOptions
from evenstep.launcher.script import TorchrunOptions
from tests.process.test_options import TASK
from tests.pure.conftest import Ended


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("lrr=1", "task() has no option lrr; did you mean lr? It has lr, width, sizes"),
        ("lr=fast", "lr is 'fast'; write a number, such as 0.1"),
        ("kind=elu", "kind is 'elu'; choose tanh or relu; did you mean relu?"),
        ("is_wide=maybe", "is_wide is 'maybe'; write true or false (or yes, no, on, off)"),
        ("sizes=1,x", "sizes is ['1', 'x']; [1]: expected int, got str"),
        ("width", "width is not an option of the task; write NAME=VALUE, such as lr=0.1"),
        ("data=here", "the data folder is given as --data"),
    ],
)
def test_a_wrong_one_is_refused_in_one_line_and_nothing_is_left(
    evenstep: Callable[..., Ended], given: str, said: str
) -> None:
    Path("my_task.py").write_text(TASK)
    done = evenstep("train", "my_task.py", given)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1
    assert not Path("runs").exists()


def test_a_task_without_any_says_how_to_add_one(evenstep: Callable[..., Ended]) -> None:
    done = evenstep("train", "digits", "lr=1")
    assert "task() has no option lr: it takes none; add a parameter: def task(lr: float = ...)" in done.err


def test_a_flag_that_is_none_may_be_meant_for_the_task(evenstep: Callable[..., Ended]) -> None:
    done = evenstep("train", "digits", "--lr", "0.1")
    assert done.code == 2
    assert "No such option: --lr; an option of the task is written lr=VALUE; see evenstep train --help" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--epochs", "abc"), "--epochs is 'abc': write a whole number, such as 4; see evenstep train --help"),
        (("--clip", "abc"), "--clip is 'abc': write a number, such as 0.5; see evenstep train --help"),
        (("--log", "tensorbord"), "--log is 'tensorbord'; choose tensorboard, wandb, mlflow or trackio"),
    ],
)
def test_an_option_of_another_type_says_what_to_write(
    evenstep: Callable[..., Ended], words: tuple[str, ...], said: str
) -> None:
    done = evenstep("train", "digits", *words)
    assert (done.code, said in done.err) == (2, True), done


def test_metrics_that_are_no_function_show_one(evenstep: Callable[..., Ended]) -> None:
    Path("my_task.py").write_text(TASK.replace("loss=lambda", 'metrics={"accuracy": len}, loss=lambda', 1))
    done = evenstep("train", "my_task.py")
    assert "Task.metrics is a dict; give a function that returns one: metrics=lambda model, batch: {" in done.err
    assert (done.code, Path("runs").exists()) == (2, False)


def test_a_mistyped_field_of_a_task_is_named(evenstep: Callable[..., Ended]) -> None:
    Path("my_task.py").write_text(TASK.replace("loss=lambda", "losss=lambda"))
    assert "did you mean loss?" in evenstep("train", "my_task.py").err


OF_TORCHRUN = [name for action in get_args_parser()._actions for name in action.option_strings]


@pytest.mark.parametrize("option", OF_TORCHRUN)
def test_an_option_of_torchrun_works_or_the_error_says_what_to_write(
    evenstep: Callable[..., Ended], option: str
) -> None:
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    if option.replace("_", "-") in {"-h", "--help", *(flag for one in run.params for flag in one.opts)}:
        return
    for words in ((option, "1"), (f"{option}=1",)):
        ended = evenstep("run", "--nproc-per-node", "2", *words, "train.py")
        assert (ended.code, Path("runs").exists()) == (2, False)
        assert ended.err.startswith(f"error: evenstep run has no option {option}; ")
        assert any(advice in ended.err for advice in ("; omit it", "; write ", "; give ")), ended.err


def test_options_of_torchrun_that_work_and_are_not_shown_are_those_that_are_read() -> None:
    assert [one.name for one in fields(HiddenTorchrunOptions)] == [one.name for one in fields(TorchrunOptions)]
