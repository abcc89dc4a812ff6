"""A custom loop with virtual replicas: `python virtual_loop_script.py STRATEGY NUM OUT`.

A generator and a discriminator with dropout, each with its optimizer, on batches of a loader and on tensors of its own;
two backwards before one step; `evenstep.log`; draws of Python and NumPy in the loss; an evaluation.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.sampling.batch_shares import share

V = 4


def d_loss(models: Any, batch: Any) -> torch.Tensor:
    d, g = models
    real = d(batch[0])
    fake = d(g(torch.randn(len(batch[0]), 6)).detach())
    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
    evenstep.log({"real": real.mean(), "each": real.flatten()})
    evenstep.log({"real": fake.mean()})
    return loss * (1 + 0.1 * random.random() + 0.1 * np.random.rand())


def g_loss(models: Any, batch: Any) -> tuple[torch.Tensor, int]:
    g, d = models
    return F.softplus(-d(g(torch.randn(len(batch[0]), 6)))).sum(), len(batch[0])


def value(model: Any, batch: Any) -> dict[str, Any]:
    return {"value": model(batch[0] + 0.1 * torch.randn_like(batch[0]))[:, 0], "count": (model(batch[0]).sum(), 3)}


def train(strategy: str, num: int) -> list[Any]:
    """Losses, logged values and evaluations of all steps, and a sum of all weights' bits."""
    team = evenstep.join(strategy, devices=["cpu"] * num, virtual_replicas=V)
    layers = nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
    d, g = team.wrap(nn.Sequential(*layers)), team.wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))
    d_optimizer = torch.optim.AdamW(d.parameters(), lr=0.01)
    g_optimizer = torch.optim.SGD(g.parameters(), lr=0.05, momentum=0.9)
    data = torch.randn(45, 5, generator=torch.Generator().manual_seed(3))
    loader = team.loader((data,), batch=10, accumulate=2)
    found: list[Any] = []
    for _ in range(2):
        for batch in loader:
            first = team.backward(d_loss, (d, g), batch)
            second = team.backward(d_loss, (d, g), batch)
            team.step(d_optimizer, clip=1.0)
            third = team.backward(g_loss, (g, d), batch)
            team.step(g_optimizer)
            found += [float(first), float(second), float(third), first.logged, random.random(), torch.rand(()).item()]
        found.append(dict(team.evaluate(value, d, loader)))
    own = share(V, team.world.rank, team.world.size)
    rows = [row for virtual in own for row in share(22, virtual, V)]
    found.append(float(team.backward(d_loss, (d, g), [data[rows]])))
    team.step(d_optimizer)
    bits = [int(weight.detach().view(torch.int32).long().sum()) for model in (d, g) for weight in model.parameters()]
    return [*found, bits]


if __name__ == "__main__":
    strategy, num, out = sys.argv[1:]
    found = train(strategy, int(num))
    Path(f"{out}-{torch.distributed.get_rank()}").write_text(json.dumps(found))
