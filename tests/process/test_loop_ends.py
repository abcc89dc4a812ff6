"""A loop of one's own, at the top of a script, ends by itself: no close() is needed, however it is left."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.marks import first_is_quick
from tests.process.test_scripts import no_ranks

LOOP = """
import sys
import torch
import evenstep
from torch.nn import Linear
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, number):
        return torch.full((4,), float(number)), number % 2

workers, left_by = int(sys.argv[1]), sys.argv[2]
team = evenstep.join()
model = team.wrap(Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = team.loader(Numbers(), batch=8, shuffle=False, workers=workers)
for epoch in range(2):
    for number, batch in enumerate(loader):
        team.backward(lambda model, batch: cross_entropy(model(batch[0]), batch[1]), model, batch)
        team.step(optimizer)
        if number == 1 and left_by == "raise":
            raise ValueError("enough")
        if number == 1 and left_by == "exit":
            sys.exit(0)
        if number == 1 and left_by == "break":
            break
print("last line")
"""
ALONE = ("loop.py",)
RUN = ("-m", "evenstep", "run", "--devices", "2", "loop.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py")


def check_loop_ends(command: tuple[str, ...], workers: int, left_by: str) -> None:
    Path("loop.py").write_text(LOOP)
    done = subprocess.run(
        [sys.executable, *command, str(workers), left_by], capture_output=True, text=True, env=no_ranks(), timeout=100
    )
    assert done.returncode == int(left_by == "raise"), done.stderr
    assert ("last line" in done.stdout) == (left_by in ("end", "break"))
    assert ("ValueError: enough" in done.stderr) == (left_by == "raise")
    assert not re.search(r"worker.*(killed|exited)", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("command", "workers", "left_by"), first_is_quick([(RUN, 1, "break"), (ALONE, 2, "end"), (ALONE, 1, "raise")])
)
def test_a_loop_with_workers_ends(command: tuple[str, ...], workers: int, left_by: str) -> None:
    check_loop_ends(command, workers, left_by)


@pytest.mark.slow
@pytest.mark.parametrize("left_by", ["end", "raise", "exit", "break"])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("command", [ALONE, RUN, TORCHRUN], ids=["alone", "run", "torchrun"])
def test_a_loop_ends_however_it_is_left(command: tuple[str, ...], workers: int, left_by: str) -> None:
    check_loop_ends(command, workers, left_by)


@pytest.mark.slow
def test_a_worker_that_hangs_does_not_keep_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = "    def __getitem__(self, number):\n        number == 31 and time.sleep(3600)\n"
    text = LOOP.replace("    def __getitem__(self, number):\n", hangs).replace("import sys", "import sys, time", 1)
    monkeypatch.setattr("tests.process.test_loop_ends.LOOP", text)
    check_loop_ends(ALONE, 1, "exit")


CRASH = """
import os, subprocess, sys, time
if os.environ["RANK"] == "1":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open("child", "w") as file:
        file.write(str(child.pid))
    os._exit(3)
time.sleep(1000)
"""


@pytest.mark.slow
def test_what_a_rank_that_died_has_started_is_ended() -> None:
    Path("loop.py").write_text(CRASH)
    done = subprocess.run([sys.executable, *RUN], capture_output=True, text=True, env=no_ranks(), timeout=100)
    assert done.returncode == 1, done.stderr
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(Path("child").read_text())).status() == psutil.STATUS_ZOMBIE
