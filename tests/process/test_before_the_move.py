"""A run written before the modules moved (at b96b275): its checkpoint, Record and samples are still read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from evenstep.record import Record
from tests.fleet import furthest, newest_weights

OLD = Path(__file__).with_name("before_the_move")


@pytest.fixture(autouse=True)
def _a_copy_of_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True, symlinks=True)


def evenstep(*arguments: str) -> str:
    command = [sys.executable, "-m", "evenstep", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_its_checkpoint_is_resumed_to_the_weights_of_an_uninterrupted_run() -> None:
    evenstep("train", "--resume", "weighted", "--steps", "24", "--name", "resumed")
    weights, reference = newest_weights(Path("runs/resumed")), load_file("after_24_steps.safetensors")
    # The gradient of a bias before BatchNorm is rounding alone, another on another CPU, and AdamW makes steps of it.
    rounded = ("0.bias", "1.running_mean")
    assert furthest(*({name: model.pop(name) for name in rounded} for model in (weights, reference))) < 1e-2
    assert furthest(weights, reference) < 1e-5
    assert [step.step for step in Record.read("runs/resumed").steps] == list(range(15, 25))


@pytest.mark.slow
def test_its_checkpoint_is_resumed_on_one_device() -> None:
    evenstep("train", "--resume", "weighted", "--strategy", "single", "--devices", "1", "--steps", "16", "--name", "on")
    assert [step.step for step in Record.read("runs/on").steps] == [15, 16]


def test_its_record_samples_and_checkpoint_are_read() -> None:
    record = Record.read("weighted")
    assert (len(record.steps), record.plan.strategy) == (14, "ddp")
    evenstep("report", "weighted")
    assert "weighted" in Path("weighted/page.html").read_text()
    assert evenstep("audit", "weighted").startswith("60 samples x 1 epoch and 24 of the next drawn by weighted")
    assert [run["run"] for run in json.loads(evenstep("runs", ".", "--json"))] == ["weighted"]
    evenstep("checkpoint", "export", "weighted", "exported", "--to", "safetensors")
    assert furthest(load_file("exported/model.safetensors"), newest_weights(Path("weighted"))) == 0
