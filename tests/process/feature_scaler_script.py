"""One rank that fits Scalers with others, then trains with one; `python feature_scaler_script.py STRATEGY OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from evenstep.data.feature_scaler import Scaler, unfitted
from evenstep.errors import TaskError
from evenstep.sampling.batch_shares import share
from evenstep.training.team import Team, join

NUM_ROWS, NUM_PICTURES, NUM_RANKS = 101, 2, 3


def table() -> torch.Tensor:
    """A large offset, which a careless merge would not survive, and a constant."""
    x = 1e8 + torch.randn(NUM_ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 3] = 0.1
    return x


def images() -> torch.Tensor:
    """Too few for every rank to have one."""
    shape = (NUM_PICTURES, 3, 5, 4)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def own(data: torch.Tensor, team: Team) -> torch.Tensor:
    return data[list(share(len(data), team.world.rank, team.world.size))]


def statistics(scaler: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in scaler.state_dict().items()}


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def report(team: Team) -> dict[str, Any]:
    """What this rank saw: statistics, an error, and the losses of a training behind a Scaler."""
    x, pictures = table(), own(images(), team)
    model = nn.Sequential(Scaler(4), nn.Linear(4, 2))
    (scaler,) = unfitted(model)
    # Batches of another size, and another number of them, on every rank.
    scaler.fit(((batch, None) for batch in own(x, team).split(8 + team.world.rank)), team.world)
    fitted = statistics(scaler)
    channels = Scaler(3, dim=1).fit(pictures.split(1), team.world)
    try:
        refused = None
        Scaler(4).fit([], team.world)
    except TaskError as error:
        refused = str(error)
    spread = team.wrap(model)
    optimizer = torch.optim.SGD(spread.parameters(), lr=0.1)
    losses = []
    for batch in team.loader((x, x[:, :2] - 1e8), batch=16):
        losses.append(team.backward(loss, spread, batch))
        team.step(optimizer)
    return {
        "pictures": len(pictures),
        "table": fitted,
        "after training": statistics(scaler),
        "images": statistics(channels),
        "refused": refused,
        "losses": losses,
    }


if __name__ == "__main__":
    team = join(sys.argv[1], devices=("cpu",) * NUM_RANKS, precision="fp64")
    reports = team.world.gather(report(team))
    if team.world.is_main:
        Path(sys.argv[2]).write_text(json.dumps(reports))
