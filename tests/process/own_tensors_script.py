"""A custom loop without a loader, whose ranks bring unequal parts: `own_tensors_script.py STRATEGY FOLDER STEPS`."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional as F

import evenstep

x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"]) * batch["scale"]


def train(strategy: str, folder: str, steps: int) -> list[float]:
    devices = ("cpu",) if strategy == "single" else ("cpu", "cpu")
    team = evenstep.join(strategy, devices=devices, precision="fp64")
    torch.manual_seed(0)
    model = team.wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run = evenstep.Run(team, model, optimizer, folder=folder)
    outputs = run.load().get("outputs", [])
    while run.step < steps:
        rows = x[7 * run.step % 50 :][: 5 + run.step % 4]
        # Every third step, rank 0 has all of it and rank 1 nothing.
        cut = len(rows) if team.world.size == 1 or run.step % 3 == 0 else 2
        own = rows[:cut] if team.world.is_main else rows[cut:]
        mean = team.backward(loss, model, {"x": own, "y": own[:, :2].sin(), "scale": torch.tensor(2.0)})
        assert mean.count == len(rows)
        team.step(optimizer)
        run.log(mean)
        outputs.append(model(x[:4].double()).sum().item())
    run.save(outputs=outputs)
    run.finish()
    return outputs


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
