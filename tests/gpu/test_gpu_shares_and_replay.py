"""Uneven shares and the replay check on a GPU, with captured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import evenstep
from evenstep.record import Record
from tests.gpu.test_gpu_cuda_graphs import task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def weights(record: Record) -> dict[str, torch.Tensor]:
    assert record.summary is not None
    return load_file(Path(str(record.summary.checkpoint)) / "weights.safetensors")


@pytest.mark.parametrize("fast", ["auto", "off"])
def test_a_replay_check_changes_no_bit_and_finds_none(fast: str) -> None:
    how: dict[str, Any] = {"devices": ("cuda:0",), "steps": 60, "fast": fast, "deterministic": True, "progress": False}
    plain = evenstep.train(task(), name="plain", **how)
    checked = evenstep.train(task(), name="checked", replay_every=5, **how)
    assert [one.outcome for one in checked.replays] == ["equal"] * 12
    assert checked.losses == plain.losses
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(checked)[name]), name


def test_auto_shares_of_a_gpu_that_is_listed_twice() -> None:
    how: dict[str, Any] = {"strategy": "dp", "devices": ("cuda:0", "cuda:0"), "steps": 300, "progress": False}
    record = evenstep.train(task(), name="auto", shares="auto", **how)
    assert record.shares is not None
    assert sum(record.shares.shares) == record.plan.batch
    assert all(seconds > 0 for seconds in record.shares.seconds_per_sample)


def test_uneven_shares_train_what_one_gpu_trains() -> None:
    how: dict[str, Any] = {"steps": 40, "precision": "fp64", "progress": False}
    plain = task(model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5)))
    one = evenstep.train(plain, name="one", devices=("cuda:0",), **how)
    two = evenstep.train(plain, name="two", strategy="dp", devices=("cuda:0", "cuda:0"), shares="4,1", **how)
    assert two.losses == pytest.approx(one.losses, rel=1e-9)
