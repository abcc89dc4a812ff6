"""Long runs: what is kept does not grow with the steps, and a restart reads none of them again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.record import Record

TASK = Path(__file__).with_name("long_task.py")


def train(*options: str, **environment: str) -> dict[str, object]:
    """Train in processes of its own; the summary."""
    shutil.copy(TASK, TASK.name)
    command = [sys.executable, "-m", "evenstep", "train", TASK.name, "--name", "long", "--json", *options]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    summary: dict[str, object] = json.loads(ended.stdout)
    return summary


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "steps"), [(1, 400), pytest.param(2, 4000, marks=pytest.mark.slow)])
def test_ranks_keep_nothing_of_a_step_that_is_over(devices: int, steps: int) -> None:
    train("--devices", str(devices), "--steps", str(steps), COUNTED=f"{steps // 4} {steps}", SAMPLES="20000")
    for rank in range(devices):
        early, late = map(int, Path(f"bytes.{rank}").read_text().split())
        # A float and its place in a list are 32.
        assert late - early < 16 * (steps - steps // 4), f"rank {rank} held {early} bytes, and {late} in the end"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["record", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_a_restart_reads_no_row_of_before_and_sums_up_all_of_them(fault: str) -> None:
    """Rows that cannot be read then do not matter; only where a checkpoint has no sums are they read."""
    options = ("--devices", "2", "--restarts", "1", "--checkpoint-every", "10", "--audit")
    summary = train(*options, FAULT=fault)
    record = Record.read("runs/long")
    assert len(record.restarts) == 1
    assert [step.step for step in record.steps] == list(range(1, 73))
    assert (summary["steps"], summary["samples"]) == (72, 288)
    last = [step.loss for step in record.steps if step.epoch == 2]
    assert summary["train_loss"] == pytest.approx(sum(last) / len(last))
    timed = record.steps[1:]
    speed = sum(step.samples for step in timed) / sum(step.seconds for step in timed)
    assert summary["samples_per_second"] == pytest.approx(speed)
    assert record.summary is not None
    assert record.summary.audit is not None
    assert record.summary.audit["is_clean"]
    best = min(record.evaluations, key=lambda one: one.values["loss"])
    assert Path("runs/long/checkpoints/best").resolve().name == f"step-{best.step:08d}"
