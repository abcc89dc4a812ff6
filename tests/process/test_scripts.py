"""Scripts written for torchrun, torch.distributed.launch, mp.spawn, accelerate and Lightning run unchanged."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"
BOTH_SPELLINGS = 'parser.add_argument("--local_rank", "--local-rank", type=int)'
DECLARATIONS = {
    "underscore": 'parser.add_argument("--local_rank", type=int)',
    "dash": 'parser.add_argument("--local-rank", type=int)',
    "both": BOTH_SPELLINGS,
    "neither": "",
}


def run(script: Path | str, *arguments: str, devices: int = 2) -> None:
    """Run a script, which must end well and say so from the rank 0 of a world of two."""
    command = [sys.executable, "-m", "evenstep", "run", "--devices", str(devices), str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=no_ranks(), timeout=100)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^rank 0 of 2 done, loss \d+\.\d{3}$", done.stdout, re.MULTILINE), done.stdout


def no_ranks() -> dict[str, str]:
    """The environment of a shell: a test may itself run below a launcher."""
    theirs = re.compile(r"(.*_)?RANK|(.*_)?WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|EVENSTEP_.*")
    return {name: value for name, value in os.environ.items() if not theirs.fullmatch(name)}


def saved(name: str = "saved.pt") -> Any:
    return torch.load(name, weights_only=True)


@pytest.mark.slow
def test_a_script_for_torchrun() -> None:
    run("env_init.py", "--epochs", "3", "--save", "saved.pt")
    assert saved()["local_ranks"] == [0, 1]
    assert saved()["model"]["weight"].shape == (1, 10)


def test_a_script_that_destroys_its_group_before_its_ddp_model() -> None:
    run("groups_in_turn.py")


@pytest.mark.slow
@pytest.mark.parametrize("declared", DECLARATIONS)
def test_a_script_that_is_given_its_local_rank_in_the_spelling_it_knows(declared: str, tmp_path: Path) -> None:
    text = (SCRIPTS / "local_rank_argument.py").read_text()
    assert BOTH_SPELLINGS in text
    script = tmp_path / "script.py"
    script.write_text(text.replace(BOTH_SPELLINGS, DECLARATIONS[declared]))
    run(script, "--lr", "0.2", "--save", "saved.pt")
    assert saved()["local_ranks"] == [0, 1]


@pytest.mark.slow
def test_a_script_that_starts_its_own_processes() -> None:
    run("spawn_inside.py", "2", "saved.pt", str(_free_port()), devices=1)
    assert saved()["weight"].shape == (5, 10)


@pytest.mark.slow
def test_a_script_that_uses_accelerate() -> None:
    pytest.importorskip("accelerate")
    run("with_accelerate.py", "--save", "saved.pt")
    assert saved()["samples"] == 70
    assert saved()["right"] > 50


@pytest.mark.slow
def test_a_script_that_uses_a_lightning_trainer() -> None:
    pytest.importorskip("lightning")
    run("with_lightning.py", "saved.ckpt")
    # 64 samples over two processes in batches of 8: 4 steps an epoch; one process alone would take 8.
    assert saved("saved.ckpt")["global_step"] == 2 * 4


@pytest.mark.slow
def test_a_script_that_uses_lightning_fabric() -> None:
    pytest.importorskip("lightning")
    run("with_fabric.py", "saved.ckpt")
    assert saved("saved.ckpt")["num_processes"] == 2


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("knows", [False, True])
def test_a_signal_is_passed_on_to_a_script(number: signal.Signals, code: int, knows: bool) -> None:
    """One that knows what to do with it ends as it likes; one that does not is ended by it."""
    own = f"signal.signal({int(number)}, lambda *_: (print('I know', flush=True), sys.exit(0)))" if knows else ""
    up = "open('up' + os.environ['RANK'], 'w').close()"
    Path("waits.py").write_text(f"import os, signal, sys, time\n{own}\n{up}\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "evenstep", "run", "--devices", "2", "waits.py"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=no_ranks()
    )
    while not (Path("up0").exists() and Path("up1").exists()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, said = process.communicate(timeout=20)
    assert process.returncode == (0 if knows else code), said
    assert ("I know" in out) == knows
    assert "checkpoint" not in said
    assert ("press Ctrl-C again" if number == signal.SIGINT else f"sent {number.name} to the script") in said


LOOP = """
import torch
from torch import nn
import evenstep

team = evenstep.join()
model = team.wrap(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in team.loader((torch.ones(16, 3),), batch=8):
    loss = team.backward(lambda model, batch: model(batch[0]).mean(), model, batch)
    team.step(optimizer)
print(loss.nowhere)
"""


def test_a_loop_that_fails_between_two_calls_is_not_said_to_be_in_the_last_one(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    command = [sys.executable, "-m", "evenstep", "run", "--devices", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=no_ranks(), timeout=100)
    headline, line, *_ = done.stderr.splitlines()
    assert re.fullmatch(r"error: rank [01] failed at step 2", headline), done.stderr
    assert line.endswith("loop.py:12 in <module>: print(loss.nowhere)")
