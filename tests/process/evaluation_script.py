"""One rank of a training with BatchNorm, one of its layers frozen by hand; `python evaluation_script.py OUT`."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import evenstep

team = evenstep.join("ddp", devices=("cpu", "cpu"))
norm, frozen = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
frozen.eval()
model = team.wrap(nn.Sequential(norm, frozen, nn.Linear(6, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = team.loader((torch.randn(40, 6), torch.randint(0, 3, (40,))), batch=10)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


for batch in loader:
    team.backward(loss, model, batch)
    team.step(optimizer)
before = norm.running_mean.tolist()
team.evaluate(lambda model, batch: {"mean": model(batch).mean(1)}, model, team.loader(torch.randn(7, 6), batch=4))
# Each rank sees one of the two kinds, and has a name for that one alone.
kinds = team.loader(torch.tensor([0.0, 0.0, 1.0, 1.0]), batch=4, shuffle=False)
named = team.evaluate(lambda model, batch: {f"kind {int(batch[0])}": batch + 5}, model, kinds)
modes = [norm.training, frozen.training]
# A model with nothing to train, whose statistics follow what each rank shows it.
teacher = team.wrap(nn.BatchNorm1d(6, affine=False))
teacher.module(torch.randn(5, 6) + team.world.rank)
shown = teacher.module.running_mean.tolist()
team.evaluate(lambda model, batch: {"mean": model(batch).mean(1)}, teacher, team.loader(torch.randn(7, 6), batch=4))
reports = team.world.gather(
    {
        "while_training": before,
        "statistics": norm.running_mean.tolist(),
        "modes": modes,
        "named": named,
        "shown": shown,
        "of the teacher": teacher.module.running_mean.tolist(),
    }
)
if team.world.is_main:
    Path(sys.argv[1]).write_text(json.dumps(reports))
