"""One rank of an fp16 training in which rank 1's samples alone overflow; `python skip_script.py STRATEGY OUT`."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import evenstep

team = evenstep.join(sys.argv[1], devices=("cpu", "cpu"), precision="fp16")
model = team.wrap(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loudness = torch.ones(20)
loudness[10:] = 30.0  # in order, the second half of the only batch is rank 1's
loader = team.loader((torch.randn(20, 6), torch.randint(0, 3, (20,)), loudness), batch=20, shuffle=False)


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]).mean()


taken = []
for _ in range(12):
    for batch in loader:
        team.backward(loss, model, batch)
        taken.append(team.step(optimizer))
weights = [float(getattr(p, "full_tensor", lambda p=p: p)().detach().double().sum()) for p in model.parameters()]
assert team.precision.scaler is not None
reports = team.world.gather({"taken": taken, "scale": team.precision.scaler.get_scale(), "weights": weights})
if team.world.is_main:
    Path(sys.argv[2]).write_text(json.dumps(reports))
