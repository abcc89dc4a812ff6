"""The command, its processes, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from evenstep.record import Record
from tests.waiting import wait_until

TASK = """
import os, signal, sys, time
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))

def task() -> Task:
    return Task(
        model=lambda: nn.Linear(4, 2),
        train=(x, (x.sum(1) > 0).long()),
        valid=(x, (x.sum(1) > 0).long()),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=6,
        epochs=2,
    )

calls = 0

def loss(model, batch):
    global calls
    calls += 1
    if os.environ.get("RANK") == os.environ.get("FAIL_RANK", "none") and calls == 7:
        fail()
    if os.environ.get("SLOW"):
        time.sleep(0.2)
    return F.cross_entropy(model(batch[0]), batch[1])

def fail():
    kind = os.environ["FAIL_KIND"]
    if kind == "raise":
        raise ValueError("the sky\\x1b[31m is falling")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_task.py"
    file.write_text(TASK)
    return file


def evenstep(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=100)


def workers_of(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["name", "cwd"])
        if process.info["name"].startswith("evenstep-rank") and process.info["cwd"] == str(folder)
    ]


@pytest.mark.fresh
def test_trains_on_two_processes_and_prints_its_summary_as_json(task_file: Path) -> None:
    done = evenstep("train", "my_task.py", "--strategy", "ddp", "--devices", "2", "--json", "--name", "one")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    record = Record.read("runs/one")
    assert summary["strategy"] == "ddp"
    assert summary["devices"] == ["cpu", "cpu"]
    assert summary["steps"] == len(record.steps) == 20
    assert summary["samples"] == 120
    assert summary["valid"]["loss"] == record.evaluations[-1].values["loss"]
    assert summary["run"] == "runs/one"
    assert Path(summary["checkpoint"], "weights.safetensors").is_file()
    assert set(summary["peak_bytes"]) == {"rank0 cpu", "rank1 cpu"}
    assert summary["train_loss"] < record.steps[0].loss
    assert summary["samples_per_second"] > 0
    assert summary["seconds"] > 0


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.slow), "2"])
def test_a_rank_that_raises_is_explained_in_15_lines(task_file: Path, rank: str) -> None:
    done = evenstep("train", "my_task.py", "--devices", "3", FAIL_RANK=rank, FAIL_KIND="raise")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("error:") :].strip().splitlines()
    assert len(report) <= 15
    assert report[0] == f"error: rank {rank} failed at step 7, in forward"
    assert "my_task.py:" in report[1]
    assert 'raise ValueError("the sky' in "\n".join(report)
    assert any(line.startswith("ValueError: the sky") for line in report)
    assert "\x1b[31m" not in done.stderr
    assert "full logs: runs/" in report[-1]
    assert workers_of(task_file.parent) == []


def test_a_rank_that_is_killed_is_named_with_its_signal(task_file: Path) -> None:
    done = evenstep("train", "my_task.py", "--devices", "2", FAIL_RANK="1", FAIL_KIND="kill")
    assert done.returncode == 1
    assert "error: rank 1 was ended by SIGKILL at step 7" in done.stderr
    assert "torch/distributed/elastic" not in done.stderr
    assert workers_of(task_file.parent) == []


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(task_file: Path) -> None:
    process = start_slow_run()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "--resume runs/slow" in said
    assert "Traceback" not in said
    assert workers_of(task_file.parent) == []


def test_workers_do_not_outlive_a_killed_launcher(task_file: Path) -> None:
    process = start_slow_run()
    assert len(workers_of(task_file.parent)) == 2
    process.kill()
    process.communicate(timeout=20)
    wait_until(lambda: workers_of(task_file.parent) == [], seconds=5)


@pytest.mark.slow
def test_a_loop_of_ones_own_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    Path("loop.py").write_text(
        "import evenstep, time\nevenstep.join()\nopen('joined', 'a').write('x')\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "evenstep", "run", "--devices", "2", "loop.py"]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(lambda: Path("joined").exists() and len(Path("joined").read_text()) == 2, seconds=60)
    ranks = workers_of(tmp_path)
    assert len(ranks) == 2
    launcher.kill()
    launcher.wait()
    wait_until(
        lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks), seconds=5
    )


def start_slow_run() -> subprocess.Popen[str]:
    """A run on two processes that has written its first checkpoint and has much left to do."""
    command = ["train", "my_task.py", "--devices", "2", "--epochs", "50", "--checkpoint-every", "1", "--name", "slow"]
    process = subprocess.Popen(
        [sys.executable, "-m", "evenstep", *command],
        env={**os.environ, "SLOW": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not Path("runs/slow/checkpoints/latest").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no checkpoint in a minute"
        time.sleep(0.1)
    return process


def test_a_run_is_repeated_by_its_plan_and_resumed_by_its_folder(task_file: Path) -> None:
    assert evenstep("train", "my_task.py", "--epochs", "1", "--seed", "3", "--name", "first").returncode == 0
    assert evenstep("train", "--plan", "runs/first/plan.json", "--name", "again").returncode == 0
    first, again = Record.read("runs/first"), Record.read("runs/again")
    assert first.losses == again.losses
    assert again.plan.seed == 3
    done = evenstep("train", "my_task.py", "--resume", "runs/first", "--epochs", "2", "--devices", "2", "--name", "on")
    assert done.returncode == 0, done.stderr
    resumed = Record.read("runs/on")
    assert [step.step for step in resumed.steps] == list(range(11, 21))
    assert resumed.plan.strategy == "ddp"
    assert resumed.plan.seed == 3
    finished = evenstep("train", "my_task.py", "--resume", "runs/on")
    assert finished.returncode == 2
    assert "nothing left to do" in finished.stderr


def test_a_loss_that_is_nan_on_one_rank_stops_all_at_that_step_and_names_the_samples(task_file: Path) -> None:
    task_file.write_text(TASK.replace("\n\ndef task", "\nx[17] = float('nan')\n\ndef task", 1))
    done = evenstep("train", "my_task.py", "--devices", "2", "--name", "nan", "--checkpoint-every", "1")
    assert done.returncode == 1
    assert "the loss is nan at step " in done.stderr
    assert "rank " in done.stderr
    report = done.stderr[done.stderr.index("error:") :]
    assert "17" in report
    assert len(report.splitlines()) <= 15
    steps = Record.read("runs/nan").steps
    assert all(step.loss == step.loss for step in steps)
    good = evenstep("checkpoint", "inspect", "runs/nan", "--json")
    assert json.loads(good.stdout)["step"] == len(steps)


@pytest.mark.slow
def test_a_parameter_without_gradient_is_named_once(task_file: Path) -> None:
    unused = TASK.replace("lambda: nn.Linear(4, 2)", "Model").replace(
        "def task()",
        "class Model(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 2)\n"
        "        self.forgotten = nn.Linear(3, 3)\n\n"
        "def task()",
        1,
    )
    task_file.write_text(unused)
    for strategy, devices in (("single", "1"), ("dp", "2"), ("ddp", "2")):
        done = evenstep("train", "my_task.py", "--steps", "2", "--strategy", strategy, "--devices", devices)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("no gradient reaches forgotten.weight, forgotten.bias (2 of 4 parameters)") == 1
        assert "requires_grad_(False)" in done.stderr


@pytest.mark.slow
def test_a_script_trains_a_task_that_it_imports_from_beside_itself(task_file: Path) -> None:
    (task_file.parent / "folder").mkdir()
    task_file.rename("folder/neighbour.py")
    Path("folder/script.py").write_text(
        "import evenstep, neighbour\nprint(evenstep.train(neighbour.task, devices=2, steps=3).summary.steps)\n"
    )
    done = subprocess.run([sys.executable, "folder/script.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"


@pytest.mark.slow
def test_an_error_of_the_users_is_explained_on_one_device_too(task_file: Path) -> None:
    done = evenstep("train", "my_task.py", RANK="0", FAIL_RANK="0", FAIL_KIND="raise")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("error:") :].strip().splitlines()
    assert report[0].startswith("error: rank 0 failed at step ")
    assert "Traceback" not in done.stderr
    (log,) = Path("runs").glob("*/logs/rank0.traceback")
    assert "Traceback" in log.read_text()


def test_a_script_without_a_guard_is_told_so_and_starts_nothing_more(task_file: Path) -> None:
    Path("script.py").write_text(TASK + "\nimport evenstep\nevenstep.train(task, devices=2, steps=3, progress=False)\n")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert 'if __name__ == "__main__"' in done.stderr
    assert len(list(Path("runs").iterdir())) == 1


@pytest.mark.slow
def test_data_made_at_the_top_of_a_file_is_the_same_under_every_strategy(task_file: Path) -> None:
    """The README's own task file."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    task_file.write_text(readme.split("```python\n")[1].split("```")[0])
    for strategy in ("single", "dp", "ddp", "fsdp"):
        more = ["--devices", "1" if strategy == "single" else "2", "--name", strategy]
        done = evenstep("train", "my_task.py", "--strategy", strategy, *more)
        assert done.returncode == 0, done.stderr
    single, *others = (Record.read(f"runs/{strategy}").losses for strategy in ("single", "dp", "ddp", "fsdp"))
    for losses in others:
        assert losses == pytest.approx(single, rel=1e-4)


def test_the_version_is_shown() -> None:
    assert evenstep("--version").stdout == "evenstep 0.1.0\n"
