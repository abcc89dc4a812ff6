"""BatchNorm over all ranks, where a rank has no sample of its own and computes one that counts for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.training.sync_batchnorm import standing_in, summed
from tests.pure.conftest import Ended


def test_a_sample_that_stands_in_adds_zeros_and_takes_part_in_backward() -> None:
    evenstep.join("single")
    values = torch.tensor([1.0, math.inf], requires_grad=True)
    assert summed(values).tolist() == [1.0, math.inf]
    with standing_in():
        total = summed(2 * values)
        assert total.tolist() == [0.0, 0.0]
        # Its backward is a collective, which the other ranks wait for.
        total.sum().backward()
        assert not summed(values.detach()).requires_grad
    assert values.grad is None


NORMED = """
import torch
from torch import nn
from evenstep import Task

def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
        train=(torch.randn(12, 4),),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=6,
    )
"""


@pytest.mark.parametrize(
    ("strategy", "cure"),
    [
        ("dp", "--strategy ddp --sync-batchnorm"),
        pytest.param("ddp", "--sync-batchnorm", marks=pytest.mark.slow),
    ],
)
def test_every_strategy_says_that_a_device_normalizes_its_share(
    strategy: str, cure: str, request: pytest.FixtureRequest
) -> None:
    command: Callable[..., Ended] = request.getfixturevalue("evenstep")
    Path("my_task.py").write_text(NORMED)
    ended = command("train", "my_task.py", "--strategy", strategy, "--devices", "cpu,cpu")
    assert ended.code == 0
    assert f"BatchNorm uses each device's share of a batch; {cure} makes it the same as on one device" in ended.err


@pytest.mark.parametrize(("rate", "more", "is_said"), [(0.1, (), True), (0.0, (), False), (0.1, (2,), False)])
def test_masks_that_differ_between_devices_are_said_to(
    rate: float, more: tuple[int, ...], is_said: bool, evenstep: Callable[..., Ended]
) -> None:
    layers = f"nn.Sequential(nn.Dropout({rate}), "
    Path("my_task.py").write_text(NORMED.replace("nn.Sequential(", layers))
    flags = [word for number in more for word in ("--virtual-replicas", str(number))]
    ended = evenstep("train", "my_task.py", "--strategy", "dp", "--devices", "cpu,cpu", *flags)
    assert ended.code == 0
    said = "dropout draws another mask on each device; --virtual-replicas 2 gives one result on any number of devices"
    assert (said in ended.err) == is_said
