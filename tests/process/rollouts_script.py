"""A custom loop of two optimizers that draws its samples: `rollouts_script.py STRATEGY FOLDER STEPS`."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

import evenstep


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def both_losses(models: Any, batch: torch.Tensor) -> torch.Tensor:
    actor, critic = models
    return (actor(batch) + critic(batch)).square().mean()


def train(strategy: str, folder: str, steps: int) -> None:
    team = evenstep.join(strategy, devices=("cpu", "cpu"), precision="fp64")
    actor, critic = (team.wrap(nn.Linear(4, 1)) for _ in range(2))
    of_actor, of_critic = (torch.optim.Adam(model.parameters(), lr=0.01) for model in (actor, critic))
    torch.manual_seed(team.world.rank)
    run = evenstep.Run(team, {"a": actor, "c": critic}, {"a": of_actor, "c": of_critic}, folder=folder)
    run.load()
    while run.step < steps:
        batch = torch.randn(6 + team.world.rank, 4) + random.random() + np.random.rand()
        c_loss = team.backward(loss, critic, batch)
        team.step(of_critic)
        a_loss = team.backward(both_losses, (actor, critic), batch[:5])
        team.step(of_actor, clip=float("inf") if run.step % 2 else 1e-3)
        run.log(a_loss, c_loss=c_loss)
        torch.randn(3)  # drawn between a step and its checkpoint
        run.save()
    run.finish()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
