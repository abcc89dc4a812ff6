"""`evenstep runs`: every state that a run can be in, through the command line; and what TAB offers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenstep.record import FILE
from evenstep.report.comparison import marking_stop
from evenstep.report.run_list import list_runs
from tests.marks import first_is_quick
from tests.pure.conftest import Ended, evenstep
from tests.waiting import wait_until

__all__ = ["evenstep"]

TASK = """
import time, torch
from torch import nn
from evenstep import Task

x = torch.randn(24, 4)

calls = 0

def task(seconds: float = 0.0, fails_at: int = 0) -> Task:
    def loss(model, batch):
        global calls
        time.sleep(seconds)
        calls += 1
        if calls == fails_at:
            raise ValueError("the data is odd")
        return model(batch[0]).square().mean()

    return Task(
        model=lambda: nn.Linear(4, 1),
        train=(x,),
        valid=(x,),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=8,
    )
"""


@pytest.fixture(autouse=True)
def _task() -> None:
    Path("my_task.py").write_text(TASK)


def start(*words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def state_of(name: str) -> str:
    found = list_runs(Path("runs")) if Path("runs").exists() else []
    return next((one.state for one in found if Path(one.run).name == name), "missing")


@pytest.mark.parametrize("devices", first_is_quick(["cpu", "cpu,cpu"]))
def test_a_run_is_running_and_then_stopped(devices: str) -> None:
    process = start("seconds=0.05", "--epochs", "1000", "--devices", devices, "--name", "long")
    wait_until(lambda: state_of("long") == "running")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert state_of("long") == "stopped"


def test_the_list_has_states_results_and_options(evenstep: Callable[..., Ended]) -> None:
    assert evenstep("runs").out == "no runs in runs; train one: evenstep train digits\n"
    assert start("--name", "whole", "--epochs", "2").wait(60) == 0
    started = Path("runs/started")
    started.mkdir()
    (started / "plan.json").write_text(Path("runs/whole/plan.json").read_text())
    lost = Path("runs/lost/logs")
    lost.mkdir(parents=True)
    (lost.parent / "plan.json").write_text(Path("runs/whole/plan.json").read_text())
    report = {"type": "RankLost", "message": "rank 1 is gone", "is_victim": True, "nanoseconds": 1}
    (lost / "rank0.error.json").write_text(json.dumps(report))
    Path("runs/torn").mkdir()
    Path("runs/torn", FILE).write_text("{")
    Path("runs/some-script/logs").mkdir(parents=True)
    found: dict[str, dict[str, Any]] = {
        Path(one["run"]).name: one for one in json.loads(evenstep("runs", "--json").out)
    }
    assert {name: one["state"] for name, one in found.items()} == {
        "whole": "done",
        "started": "not started",
        "lost": "failed",
        "torn": "unreadable",
    }
    assert (found["whole"]["step"], found["whole"]["epoch"], found["whole"]["strategy"]) == (6, 2, "single")
    assert found["whole"]["valid"].keys() == {"loss"}
    assert found["lost"]["error"] == "a rank was killed before the first step"
    lines = evenstep("runs", "runs").out.splitlines()
    assert lines[0].split() == ["state", "at", "result", "run"]
    assert any(line.startswith("done") and "step 6" in line and line.endswith("runs/whole") for line in lines)
    refused = evenstep("runs", "nowhere")
    assert (refused.code, refused.err) == (2, "error: nowhere is not a folder; give the one that was given to --out\n")


def test_a_failed_run_shows_its_first_error() -> None:
    assert start("fails_at=12", "--epochs", "9", "--devices", "cpu,cpu", "--name", "broken").wait(60) == 1
    (one,) = list_runs(Path("runs"))
    assert (one.state, one.error) == ("failed", "ValueError: the data is odd")


def test_a_run_whose_rank_was_killed_shows_that_and_not_the_loss_of_it() -> None:
    process = start("seconds=0.05", "--epochs", "1000", "--devices", "cpu,cpu", "--name", "broken")
    wait_until(lambda: state_of("broken") == "running" and list_runs(Path("runs"))[0].step)
    (rank,) = [one for one in psutil.Process(process.pid).children(True) if one.name() == "evenstep-rank1"]
    rank.kill()
    assert process.wait(60) == 1
    (one,) = list_runs(Path("runs"))
    assert (one.state, (one.error or "").partition(" at step ")[0]) == ("failed", "rank 1 was ended by SIGKILL")


def test_a_killed_run_is_called_that_and_a_long_record_is_not_read() -> None:
    process = start("seconds=0.05", "--epochs", "1000", "--name", "long")
    wait_until(lambda: state_of("long") == "running" and list_runs(Path("runs"))[0].step)
    process.kill()
    process.wait(60)
    assert state_of("long") == "killed"
    record = Path("runs/long", FILE)
    first, *others = record.read_text().splitlines(keepends=True)
    record.write_text(first + "no JSON\n" * 20_000 + others[-1] * 1000)
    assert state_of("long") == "killed"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("evenstep tra", "train"),
        ("evenstep train my", "my_task.py"),
        ("evenstep train dig", "digits"),
        ("evenstep train my_task.py --strategy fs", "fsdp"),
        ("evenstep train --config ru", "run.toml"),
        ("evenstep report ru", "runs/"),
    ],
)
def test_tab_completes(words: str, offered: str) -> None:
    Path("run.toml").touch()
    Path("runs").mkdir()
    variables = {"_EVENSTEP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-c", "import sys; sys.argv = ['evenstep']; import evenstep.__main__ as m; m.main()"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, timeout=60)
    assert offered in done.stdout.split(), done.stderr
    assert "torch" not in done.stderr


@pytest.mark.parametrize("verb", [["train"], ["run"], ["runs"], ["verify"], ["checkpoint", "inspect"], []])
def test_h_is_help(verb: list[str], evenstep: Callable[..., Ended]) -> None:
    ended = evenstep(*verb, "-h")
    assert ended.code == 0
    assert "Usage: " in ended.out


def test_what_was_predicted_or_compared_by_links_is_listed_as_that(evenstep: Callable[..., Ended]) -> None:
    predicted = evenstep("predict", "my_task.py", "--devices", "1")
    assert predicted.code == 0, predicted.err
    compared = evenstep(
        "compare", "my_task.py", "--links", "none,bf16", "--devices", "2", "--steps", "3", "--seeds", "2"
    )
    assert compared.code == 0, compared.err
    assert [one.state for one in list_runs(Path("runs"))] == ["predicted", "compared"]


def test_a_comparison_that_was_stopped_is_listed_as_stopped() -> None:
    assert start("--name", "whole", "--epochs", "1").wait(60) == 0
    folder = Path("runs/compared")
    folder.mkdir()
    (folder / "plan.json").write_text(Path("runs/whole/plan.json").read_text())
    with pytest.raises(KeyboardInterrupt), marking_stop(folder):
        raise KeyboardInterrupt
    assert state_of("compared") == "stopped"
