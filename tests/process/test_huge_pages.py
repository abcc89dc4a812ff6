"""Ranks on a CPU, and a command that trains in its own process, get large tensors in huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.distributed.huge_pages import ENABLED, NAME, VALUE, has_huge_pages, huge_page_variables

TASK = """
import os
from pathlib import Path

import torch
from torch import nn
from evenstep import Task


def in_huge_pages():
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("AnonHugePages"))


def made():
    # 128 MiB, and how much of it is in huge pages
    before = in_huge_pages()
    large = torch.ones(2**25)
    return large, in_huge_pages() - before


def loss(model, batch):
    large, in_loss = made()
    with open(f"huge-{os.environ.get('RANK', 0)}", "w") as file:
        file.write(f"{in_task} {in_loss}")
    return (model(batch[0]) - batch[1]).pow(2).mean() * large[0]


def task():
    global in_task
    _, in_task = made()
    data = torch.randn(8, 2), torch.randn(8, 1)
    return Task(
        model=lambda: nn.Linear(2, 1),
        train=data,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=8,
        steps=1,
    )
"""
WORDS = [
    ("--devices", "1"),
    ("--strategy", "dp", "--devices", "cpu,cpu"),
    ("--strategy", "ddp", "--devices", "2"),
]
needs_huge_pages = pytest.mark.skipif(
    NAME not in os.environ and not huge_page_variables({}), reason="this system offers malloc no huge pages"
)


def huge_mebibytes(*words: str, **variables: str) -> list[tuple[int, int]]:
    """What each rank had in huge pages of a tensor of 128 MiB: in one that the task made, and in one of its loss."""
    Path("my_task.py").write_text(TASK)
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", "--quiet", *words]
    subprocess.run(command, check=True, env={**os.environ, **variables}, timeout=100)
    found = sorted(Path().glob("huge-*"))
    numbers = [map(int, file.read_text().split()) for file in found]
    return [(of_task // 1024, of_loss // 1024) for of_task, of_loss in numbers]


@pytest.mark.fresh
@needs_huge_pages
@pytest.mark.parametrize("words", WORDS)
def test_large_tensors_of_a_step_are_in_huge_pages(words: tuple[str, ...]) -> None:
    found = huge_mebibytes(*words)
    assert len(found) == (2 if "ddp" in words else 1)
    # What is at both ends may be in small ones.
    assert all(of_task <= 8 and of_loss >= 120 for of_task, of_loss in found), found


@pytest.mark.fresh
@needs_huge_pages
@pytest.mark.skipif(has_huge_pages() and "[always]" in ENABLED.read_text(), reason="here malloc need not ask for them")
@pytest.mark.parametrize("words", WORDS)
def test_what_the_user_chose_is_left_alone(words: tuple[str, ...]) -> None:
    assert all(of_task <= 8 and of_loss <= 8 for of_task, of_loss in huge_mebibytes(*words, **{NAME: ""}))


@pytest.mark.fresh
@needs_huge_pages
def test_a_command_that_starts_again_has_its_arguments_and_its_exit_code() -> None:
    command = [sys.executable, "-m", "evenstep", "train", "no such task.py", "text=a b"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert "no such task.py" in ended.stderr


@needs_huge_pages
@pytest.mark.parametrize("name", [NAME, "LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"])
def test_nothing_is_set_beside_a_choice_of_the_user(name: str) -> None:
    assert huge_page_variables({}) == {NAME: VALUE}
    assert huge_page_variables({name: ""}) == {}


@needs_huge_pages
def test_nothing_is_set_where_it_would_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("enabled").write_text("always madvise [never]\n")
    with monkeypatch.context() as changed:
        changed.setattr("evenstep.distributed.huge_pages.ENABLED", Path("enabled"))
        assert huge_page_variables({}) == {}
        changed.setattr("evenstep.distributed.huge_pages.ENABLED", Path("none"))
        assert huge_page_variables({}) == {}
    monkeypatch.setattr("evenstep.distributed.huge_pages.DRIVERS", (Path("enabled"),))
    assert huge_page_variables({}) == {}
