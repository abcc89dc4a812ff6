"""With --replicas, a run has the same bits on any number of devices."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from evenstep.plan import Plan
from tests.fleet import furthest, result, run_jobs

STEPS = 60
BATCH = 18  # virtual replicas of 5, 5, 4 and 4 samples; the last batch of an epoch has 13
V = 4


def plan(where: str, **more: object) -> Plan:
    strategy, _, num = where.partition("-")
    values = {"batch": BATCH, "steps": STEPS, "replicas": V, "clip": 1.0, **more}
    return Plan(strategy=strategy, devices=("cpu",) * int(num or 1), **values)


def digest(run: Path) -> str:
    """Of weights and optimizer state of the latest checkpoint."""
    content = hashlib.sha256()
    for file in ("weights", "optimizer"):
        for name, tensor in sorted(load_file(run / "checkpoints" / "latest" / f"{file}.safetensors").items()):
            content.update(name.encode())
            content.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


@pytest.mark.parametrize(("loss", "accumulate"), [("mean", 1), ("pair", 2)])
def test_they_learn_what_one_device_learns(tmp_path: Path, loss: str, accumulate: int) -> None:
    key = f"mlp/adamw/{loss}"
    plans = {"plain": {"replicas": None}, "virtual": {"accumulate": accumulate}}
    jobs = [(name, plan("single", precision="fp64", threads=1, **more), key) for name, more in plans.items()]
    run_jobs(tmp_path, 1, jobs)
    plain, virtual = (result(tmp_path, name) for name in plans)
    assert virtual.record.losses == pytest.approx(plain.record.losses, rel=1e-9)
    assert furthest(virtual.weights, plain.weights) < 1e-9
    for ours, theirs in zip(virtual.record.evaluations, plain.record.evaluations, strict=True):
        assert ours.values == pytest.approx(theirs.values, rel=1e-9)
