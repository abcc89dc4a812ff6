"""--suggest tries what might be faster, says what it gives, and changes nothing."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import evenstep
from evenstep.compare import faster_options as suggesting
from evenstep.compare.faster_options import TRIED, Suggestion, suggest
from evenstep.report.terminal import show_suggestions

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task


def task():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 3, 8, 8, generator=generator), torch.randint(0, 5, (256,), generator=generator)
    return Task(
        model=lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)),
        train=(x, y),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


@pytest.fixture(autouse=True)
def _task_file() -> None:
    Path("my_task.py").write_text(TASK)


@pytest.mark.slow
def test_changes_are_tried_on_the_same_samples_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggesting, "TRIED", TRIED[:4])
    said: list[str] = []
    plain, *others = suggest("my_task.py", {"seed": 1}, said.append)
    assert plain.flag == ""
    assert [one.flag for one in others] == ["--precision bf16", "--channels-last"]  # tf32 is a way of cards
    for one in others:
        assert len(one.rounds) == 2
        assert one.loss == pytest.approx(plain.loss, rel=0.05)
    assert not list(Path("runs").iterdir())
    assert len(said) == 6


@pytest.mark.slow
def test_what_is_chosen_already_is_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggesting, "TRIED", TRIED[:4])
    found = suggest("my_task.py", {"precision": "bf16", "channels_last": True}, lambda line: None)
    assert [one.flag for one in found] == [""]


def test_channels_last_learns_the_same_and_its_checkpoints_are_like_any_other() -> None:
    plain = evenstep.train("my_task.py", epochs=2, name="plain", progress=False)
    last = evenstep.train("my_task.py", epochs=1, name="last", channels_last=True, progress=False)
    assert last.summary is not None
    rest = evenstep.train("my_task.py", epochs=2, name="rest", resume="runs/last", progress=False)
    losses = [step.loss for step in (*last.steps, *rest.steps)]
    assert losses == pytest.approx([step.loss for step in plain.steps], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_prints_json_and_trains_nothing() -> None:
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", "--suggest", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=390)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert [one["flag"] for one in found] == ["", "--precision bf16", "--channels-last", "--compile"]
    assert not list(Path("runs").iterdir())


def shown(*found: Suggestion) -> str:
    console = Console(file=io.StringIO(), width=80)
    show_suggestions(list(found), "evenstep train my_task.py", console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_best_is_named_with_its_command_if_the_rounds_agree() -> None:
    plain = Suggestion("", "as it is", (0.010, 0.011), 0.5, 1.0)
    faster = Suggestion("--precision bf16", "computes in bfloat16", (0.005, 0.006), 0.5, 1.01)
    unsure = Suggestion("--channels-last", "another order", (0.004, 0.012), 0.5, 1.0)
    broken = Suggestion("--compile", "torch.compile", problem="no compiler")
    text = shown(plain, faster, unsure, broken)
    assert "evenstep train my_task.py --precision bf16" in text
    assert "does not run: no compiler" in text
    assert "none of these is worth a change" in shown(plain, Suggestion("--compile", "", (0.012, 0.011), 0.5, 1.0))
    assert "nothing is recommended: --channels-last may be faster" in shown(plain, unsure)


def test_it_says_after_how_many_steps_a_change_has_paid_for_its_start() -> None:
    plain = Suggestion("", "as it is", (0.010,), 1.0, 1.0)
    assert Suggestion("--compile", "", (0.005,), 11.0, 1.0).pays_after(plain) == 2000
    assert Suggestion("--compile", "", (0.020,), 11.0, 1.0).pays_after(plain) is None
