"""fsdp's own mixed precision under --precision bf16, beside single's autocast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep.plan import Plan
from evenstep.strategies.fsdp_precision import can_be_gathered_in_half
from tests.fleet import result, run_jobs, run_processes
from tests.marks import first_is_quick

pytestmark = pytest.mark.timeout(300)
KEYS = ["gpt/adamw/pair", "mlp/sgd/mean", "norm/adamw/mean", "spectral/sgd/mean", "tied/adamw/mean"]
LOSS_TOLERANCE = 0.02
"""Relative, of each of 20 steps: two roundings to bfloat16, as docs/large-models.md says."""
WEIGHT_TOLERANCE = 0.02


def plan(where: str, key: str) -> Plan:
    num = 1 if where == "single" else 2
    joins = where == "fsdp" and key.startswith("norm")
    fields = {"batch": 24, "steps": 20, "precision": "bf16", "threads": 1, "sync_batchnorm": joins}
    return Plan(strategy=where, devices=("cpu",) * num, **fields)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("bf16")
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    keys = [one.params["key"] for one in specs if one is not None and "key" in one.params]
    for size, where in ((1, "single"), (2, "fsdp")):
        run_jobs(folder, size, [(f"{where}-{key}", plan(where, key), key) for key in keys])
    return folder


@pytest.mark.parametrize("key", first_is_quick(KEYS))
def test_learns_what_single_learns_in_autocast(trained: Path, key: str) -> None:
    single, fsdp = (result(trained, f"{where}-{key}") for where in ("single", "fsdp"))
    assert fsdp.record.losses == pytest.approx(single.record.losses, rel=LOSS_TOLERANCE)
    # Of all weights together: Adam moves a bias without a clear gradient by its learning rate, one way or the other.
    ours, theirs = (torch.cat([one.flatten() for one in run.weights.values()]).double() for run in (fsdp, single))
    assert (ours - theirs).norm() < WEIGHT_TOLERANCE * theirs.norm()


def test_gathers_in_bfloat16_and_keeps_float32_elsewhere(tmp_path: Path) -> None:
    run_processes(
        Path(__file__).with_name("fsdp_precision_script.py"), [str(tmp_path / "seen.json")], 2, tmp_path / "logs"
    )
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["input"], seen["output"], seen["loss"]) == ("torch.float32", "torch.bfloat16", "torch.float32")
    assert seen["masters"] == seen["gradients"] == ["torch.float32"]
    lstm = seen["gathered"].pop("model.recurrent.0")
    assert lstm == "None"
    assert set(seen["gathered"].values()) == {"torch.bfloat16"}
    assert len(seen["gathered"]) == 3
    assert all(0.5 < loss < 3 for loss in seen["losses"])


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.TransformerEncoderLayer(8, 2, 16), True),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)), True),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), False),
        (nn.LSTM(2, 2), False),
        (nn.Linear(2, 2).double(), False),
    ],
)
def test_units_that_need_their_own_type_keep_it(layer: nn.Module, expected: bool) -> None:
    assert can_be_gathered_in_half(layer) is expected
