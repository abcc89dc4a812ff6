"""One rank of a training with dropout, which keeps the masks that it drew; `python dropout_script.py OUT`."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import evenstep

WIDTH = 64

team = evenstep.join("ddp", devices=("cpu", "cpu"))
model = team.wrap(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
masks: list[str] = []


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    drawn = F.dropout(torch.ones(WIDTH), p=0.5)
    masks.append("".join("1" if value else "0" for value in drawn.tolist()))
    return model(batch).square().mean()


for number, batch in enumerate(team.loader(torch.randn(24, 2), batch=8)):
    for _ in range(2 if number == 0 else 1):
        team.backward(loss, model, batch)
    team.step(optimizer)
every = team.world.gather(masks)
if team.world.is_main:
    Path(sys.argv[1]).write_text(json.dumps(every))
