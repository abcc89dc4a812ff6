"""BatchNorm over all ranks, where a rank has no sample of its own and computes one that counts for nothing."""

from __future__ import annotations

import math

import torch

import evenstep
from evenstep.training.batchnorm import standing_in, summed


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
