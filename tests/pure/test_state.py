"""State that is taken out of a training and put into another one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenstep.checkpoint.state_dict import load_optimizer_state, optimizer_state

OPTIMIZERS = (torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Adamax, torch.optim.Rprop)


def trained(kind: type[torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    optimizer = kind(module.parameters())
    take_step(module, optimizer)
    return module, optimizer


def take_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.arange(6.0, dtype=torch.float64).view(2, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_comes_back_in_its_own_precision(kind: type[torch.optim.Optimizer]) -> None:
    """NAdam keeps a product in a float32 beside float64 weights; torch alone loads it as a float64."""
    (module, optimizer), (other, loaded) = trained(kind), trained(kind)
    take_step(module, optimizer)
    other.load_state_dict(module.state_dict())
    tensors, values = optimizer_state(module, optimizer)
    load_optimizer_state(other, loaded, {name: one.clone() for name, one in tensors.items()}, values)
    for _ in range(3):
        take_step(module, optimizer)
        take_step(other, loaded)
    dtypes = [[value.dtype for value in loaded.state[weight].values()] for weight in other.parameters()]
    assert dtypes == [[value.dtype for value in optimizer.state[weight].values()] for weight in module.parameters()]
    assert all(one.equal(another) for one, another in zip(module.parameters(), other.parameters(), strict=True))
