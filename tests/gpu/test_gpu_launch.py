"""Launching on a GPU: copied from the fork server, restarted, stalled, out of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from evenstep.record import Record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TASK = """
import os, signal, time
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

PART = 0.05
x = torch.randn(480, 16, generator=torch.Generator().manual_seed(0))

class Net(nn.Sequential):
    def forward(self, batch):
        return super().forward(batch)

def task() -> Task:
    return Task(
        model=lambda: Net(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)),
        train=(x, (x.sum(1) > 0).long()),
        valid=(x, (x.sum(1) > 0).long()),
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch=24,
        epochs=3,
    )

calls = 0

def loss(model, batch):
    global calls
    calls += 1
    if not torch.is_grad_enabled():
        return F.cross_entropy(model(batch[0]), batch[1])
    kind, rank = os.environ.get("FAIL_KIND"), os.environ.get("RANK", "0")
    if kind and calls == 12 and rank == os.environ.get("FAIL_RANK", "0") and not os.path.exists("failed"):
        if kind != "memory":
            open("failed", "w").close()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "spin":
            torch.cuda._sleep(10**13)
            torch.cuda.synchronize()
    if kind == "memory":
        # A part of the GPU: other tests use it at the same time.
        torch.cuda.set_per_process_memory_fraction(PART)
        wide = batch[0][:, :1].expand(-1, int(os.environ["WIDTH"]))
        held = [(wide * model[0].weight.sum()).tanh() for _ in range(128)]
        return sum(one.mean() for one in held) + F.cross_entropy(model(batch[0]), batch[1])
    if os.environ.get("SLOW"):
        time.sleep(0.05)
    return F.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(TASK)
    return tmp_path


def evenstep(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=170)


def weights(name: str) -> bytes:
    return Path("runs", name, "checkpoints", "latest", "weights.safetensors").read_bytes()


SHARED = ("--strategy", "ddp", "--devices", "cuda:0,cuda:0")
ALONE = ("--strategy", "ddp", "--devices", "cuda:0")


@pytest.mark.parametrize("where", [SHARED, ALONE], ids=["two ranks over gloo", "one rank over NCCL"])
def test_a_killed_rank_goes_on_to_the_same_weights(where: tuple[str, ...]) -> None:
    assert evenstep(*where, "--name", "undisturbed").returncode == 0
    rank = "1" if where is SHARED else "0"
    more = ("--restarts", "1", "--checkpoint-every", "5", "--audit", "--name", "killed")
    done = evenstep(*where, *more, FAIL_KIND="kill", FAIL_RANK=rank)
    assert done.returncode == 0, done.stderr
    assert f"rank {rank} was ended by SIGKILL at step 12" in done.stderr
    assert "restart 1 of 1, from step-00000010" in done.stderr
    assert weights("killed") == weights("undisturbed")
    assert [step.step for step in Record.read("runs/killed").steps] == list(range(1, 61))


@pytest.mark.parametrize("where", [SHARED, ALONE], ids=["two ranks over gloo", "one rank over NCCL"])
def test_a_gpu_that_never_finishes_is_noticed_and_the_line_is_named(where: tuple[str, ...]) -> None:
    done = evenstep(*where, "--stall-after", "5", FAIL_KIND="spin", FAIL_RANK="0")
    assert done.returncode == 124, done.stderr
    assert "rank 0" in done.stderr
    assert "my_task.py:" in done.stderr
    assert "step 12" in done.stderr


def test_sigterm_saves_at_one_step_and_a_resumed_run_is_exact() -> None:
    assert evenstep(*SHARED, "--name", "undisturbed").returncode == 0
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", *SHARED, "--name", "asked"]
    run = subprocess.Popen(command, env={**os.environ, "SLOW": "1"}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    record = Path("runs/asked/record.jsonl")
    while not (record.exists() and '"step": 7,' in record.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=30) == 75
    assert evenstep("--resume", "runs/asked", "--name", "on").returncode == 0
    assert weights("on") == weights("undisturbed")


@pytest.mark.parametrize("where", [("--devices", "cuda:0"), ALONE], ids=["single", "ddp"])
def test_a_step_that_does_not_fit_is_answered_with_the_number_that_does(where: tuple[str, ...]) -> None:
    _, total = torch.cuda.mem_get_info()
    # What tanh keeps of 128 tensors of batch x width floats: four times what is there, for the whole batch.
    width = int(4 * 0.05 * total / (24 * 128 * 4))
    done = evenstep(*where, "--batch", "24", "--name", "large", FAIL_KIND="memory", WIDTH=str(width))
    assert done.returncode == 1, done.stderr[-3000:]
    assert "out of memory" in done.stderr
    assert "--accumulate " in done.stderr
    assert "tried" in done.stderr
    number = done.stderr.split("--accumulate ")[1].split()[0].rstrip(",.;:)")
    again = evenstep(
        *where, "--batch", "24", "--accumulate", number, "--steps", "1", FAIL_KIND="memory", WIDTH=str(width)
    )
    assert again.returncode == 0, again.stderr


def test_what_the_fork_server_holds_has_not_touched_the_gpu() -> None:
    code = "import evenstep.worker.preload, torch; print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False False", done.stderr
