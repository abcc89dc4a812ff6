"""What `evenstep compare` refuses, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenstep.errors import PlanError
from evenstep.verify.configurations import find_configs

TASK = """
import torch
from torch import nn
from evenstep import Task

def task() -> Task:
    return Task(
        model=lambda: nn.Linear(4, 2),
        train=(torch.randn(60, 4),),
        loss=lambda model, batch: model(batch[0]).pow(2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("my_task.py", "--strategies", "dpp"),
            "unknown strategy 'dpp'; choose from single, dp, ddp, fsdp",
        ),
        (("my_task.py", "--devices", "two"), "device"),
        (("my_task.py", "--devices", "0,1"), "0 devices were requested"),
        (("nothing.py",), "no file nothing.py"),
        (("my_task.py", "--rounds", "0"), "--rounds"),
        (("my_task.py", "--batch", "1", "--devices", "1,2"), "a global batch of 1 is too small for"),
    ],
)
def test_bad_input_is_refused_with_code_2(evenstep: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    Path("my_task.py").write_text(TASK)
    ended = evenstep("compare", *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert list(Path().glob("runs/*")) == []


def test_single_comes_first_and_others_where_they_make_sense() -> None:
    assert [config.label for config in find_configs(None, "cpu/cpu,cpu")] == ["single", "dp x 2", "ddp x 2", "fsdp x 2"]
    named = find_configs("ddp,dp", "cpu/cpu,cpu")
    assert [config.label for config in named] == ["single", "ddp", "ddp x 2", "dp x 2"]
    assert [config.label for config in find_configs("fsdp", "cpu,cpu")] == ["single", "fsdp x 2"]


def test_two_lists_of_as_many_devices_are_for_two_commands() -> None:
    with pytest.raises(PlanError, match="names two lists of the same length"):
        find_configs(None, "cpu,cpu/cpu,cpu")
