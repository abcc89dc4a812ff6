"""Four ranks, a model split over two of them and sharded over two replicas: what each holds, trains and refuses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

import evenstep
from evenstep.distributed.parameter_slices import joined, slice_of
from evenstep.errors import TaskError
from evenstep.monitor.replica_check import ReplicaCheck

STEPS = 4


class Heads(nn.Module):
    """Each rank applies a norm, which it holds whole, to its own heads: gradients of the norm are summed."""

    _tp_plan: ClassVar = {"up": "colwise", "down": "rowwise", "norm": "replicated_with_grad_allreduce"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.LayerNorm(4), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).view(len(x), -1, 4)
        return self.down(self.norm(heads).tanh().flatten(1))


def made() -> nn.Module:
    torch.manual_seed(3)
    return Heads().double()


def loss(model: Any, batch: Any) -> torch.Tensor:
    found: torch.Tensor = (model(batch[0]).square().sum(1) - 1).square().mean()
    return found


def difference_to_one_device(data: torch.Tensor, trained: dict[str, torch.Tensor]) -> float:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in data.split(8):
        optimizer.zero_grad()
        loss(model, (batch,)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return max(float((trained[name] - one).abs().max()) for name, one in model.named_parameters())


def held(tensor: Any) -> int:
    number: int = tensor.to_local().numel()
    return number


def main(folder: Path) -> None:
    team = evenstep.join("tensor", mesh="fsdp=2,tensor=2", precision="fp64")
    model = team.wrap(made())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for batch in team.loader((data,), batch=8, shuffle=False):
        team.backward(loss, model, batch)
        team.step(optimizer, clip=0.1)
    named = dict(model.module.named_parameters())
    seen: dict[str, Any] = {
        "whole": {name: math.prod((slice_of(one) or one).shape) for name, one in named.items()},
        "held": team.world.gather({name: held(one) for name, one in named.items()}),
        "state": team.world.gather({name: held(optimizer.state[one]["exp_avg"]) for name, one in named.items()}),
    }
    trained = {name: joined(one) for name, one in named.items()}
    trained = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in trained.items()}
    seen["difference"] = max(team.world.gather(difference_to_one_device(data, trained)))
    ReplicaCheck(team.world, model.module).compare(STEPS)
    try:
        team.check(torch.optim.Adafactor(model.parameters()))
    except TaskError as error:
        seen["refused"] = str(error)
    if team.world.is_main:
        (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
