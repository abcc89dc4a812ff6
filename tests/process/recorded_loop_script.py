"""A custom loop that leaves a Record: `recorded_loop_script.py STRATEGY FOLDER EPOCHS [FAIL_AT]`."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional as F

import evenstep

generator = torch.Generator().manual_seed(0)
x = torch.randn(53, 6, generator=generator)
y = x[:, :2].sin()


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def metrics(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"loss": (model(batch[0]) - batch[1]).square().mean(1), "error": (model(batch[0]) - batch[1]).abs().mean(1)}


def train(strategy: str, folder: str, epochs: int, fail_at: int = 0) -> None:
    devices = ("cpu",) if strategy == "single" else ("cpu", "cpu")
    team = evenstep.join(strategy, devices=devices, precision="fp64")
    torch.manual_seed(0)
    model = team.wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = team.loader((x[:41], y[:41]), batch=8)
    valid = team.loader((x[41:], y[41:]), batch=8, shuffle=False)
    run = evenstep.Run(team, model, optimizer, loader, scheduler, folder=folder, log="tensorboard", best="error")
    seen = run.load().get("seen", [])
    while loader.epoch < epochs and run.evaluations_since_best < 3:
        for batch in loader:
            mean = team.backward(loss, model, batch)
            team.step(optimizer)
            run.log(mean)
            scheduler.step()
            if run.step == fail_at - 1:
                run.save(seen=seen)
            if run.step == fail_at:
                raise RuntimeError("lost")
        seen.append(run.evaluate(metrics, model, valid)["error"])
        run.save(seen=seen)
    run.finish()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
