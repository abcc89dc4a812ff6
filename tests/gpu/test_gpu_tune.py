"""`evenstep tune` on a card: several small trials share it, as many as their memory allows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenstep.record import Record
from evenstep.tune.study import read_study

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'evenstep[tune]'")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TASK = Path(__file__).parents[1] / "process" / "tuned_task.py"


def tune(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", "tune", str(TASK), "--search", "lr", *words, "--devices", "cuda:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("per_device", ["3", "auto"])
def test_small_trials_share_a_gpu_and_learn_what_they_learn_alone(per_device: str) -> None:
    shared = tune("--trials", "8", "--per-device", per_device, "--name", "shared")
    num = 3
    if per_device == "auto":
        found = re.search(r"(\d+) trials per device: each needs", shared.stderr)
        assert found, shared.stderr
        num = int(found[1])
    study = read_study(Path("runs/shared"))
    assert study.request.slots == num > 1
    assert len(study.ranking(0)) == 8
    spans = [(one.began[0].at, one.reached[0].at) for one in study.trials.values()]
    assert max(sum(begin <= at < end for begin, end in spans) for at, _ in spans) == min(num, 8)
    best = study.best
    assert best is not None
    plan = f"runs/shared/trials/{best.folder}/plan.json"
    alone = [sys.executable, "-m", "evenstep", "train", str(TASK), "--plan", plan, "--name", "alone"]
    subprocess.run(alone, check=True, capture_output=True, timeout=200)
    losses = Record.read(Path(f"runs/shared/trials/{best.folder}")).losses
    assert Record.read(Path("runs/alone")).losses == pytest.approx(losses, rel=1e-4)
