"""Two weights whose gradients torch keeps in the same memory; `python tied_gradients_script.py OUT STRATEGY`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenstep
from evenstep.training.team import Team

WIDTH = 40_000
"""More than what all ranks add up as one piece."""


class Twins(nn.Module):
    """The sum of two tables, each seen through a view: backward hands the same numbers to both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = ((self.one.unsqueeze(0) + self.other.unsqueeze(0)) * x).sum(1)
        return values


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    value: torch.Tensor = model(batch[0]).mean()
    return value


def pair(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return model(batch[0]).sum(), len(batch[0])


def errors(team: Team) -> dict[str, float]:
    """How far a step of gradient descent ends from where it should, for each way of taking it."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    found = {}
    for name, loss, accumulate, clip in (
        ("plain", mean, 1, None),
        ("accumulated", mean, 2, None),
        ("pair", pair, 1, None),
        ("clipped", mean, 1, 1.0),
    ):
        model = team.wrap(Twins())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for batch in team.loader((x,), batch=8, accumulate=accumulate):
            team.backward(loss, model, batch)
            team.step(optimizer, clip=clip)
        gradient = x.double().mean(0)
        right = gradient / (2**0.5 * gradient.norm()) if clip else gradient
        ends = team.infer(lambda bare: [-bare.one.detach().double(), -bare.other.detach().double()], model)
        found[name] = max(float((end - right).abs().max()) for end in ends)
    return found


if __name__ == "__main__":
    out, strategy = Path(sys.argv[1]), sys.argv[2]
    team = evenstep.join(strategy, ("cpu", "cpu"))
    found = team.world.gather(errors(team))
    if team.world.is_main:
        out.write_text(json.dumps(found))
