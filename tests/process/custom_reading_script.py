"""One of two ranks whose loop counts itself, on shared and on separate data; `custom_reading_script.py OUT`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

team = evenstep.join("ddp", devices=("cpu", "cpu"))
rank = team.world.rank
model = team.wrap(nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]


def refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except evenstep.EvenstepError as error:
        return str(error)
    return "nothing"


def by_hand(data: Any) -> dict[str, int]:
    """What a loop counts that looks at every piece of its own."""
    found = {"samples": 0, "positive": 0, "pieces": 0}
    for batch in team.loader(data, batch=16, shuffle=False):
        (x,) = batch.data if isinstance(batch.data, tuple | list) else (batch.data,)
        found["samples"] += len(x)
        found["positive"] += int((x > 0).sum())
        found["pieces"] += 1
        model(x)
    return found


mine = 1000.0 * rank + torch.arange(40.0)[:, None]
seen, steps = [], []
loader = team.loader(mine, batch=8, mine=True)
for batch in loader:
    team.backward(loss, model, batch)
    data = batch.micro_batches[0][0].data
    seen += data[:, 0].tolist()
    (gradient,) = [weight.grad.item() for weight in model.parameters() if weight.grad is not None]
    steps.append({"samples": batch.num_samples, "gradient": gradient, "mean": data.mean().item()})
    team.step(optimizer)
measured = team.evaluate(lambda model, batch: {"mean": batch[:, 0], "all": (len(batch), 1)}, model, loader)
told = {
    "shared": by_hand(torch.ones(65, 1)),
    "shared, as a dataset": by_hand(TensorDataset(torch.ones(65, 1))),
    "own": {"seen": sorted(seen), "steps": steps, "epoch": loader.epoch},
    "measured": measured,
    "num_measured": measured.num_samples,
    "fewer": refusal(lambda: team.loader(mine[: 40 - rank], batch=8, mine=True)),
    "tensors": refusal(lambda: team.backward(loss, model, ("x", 1))),
    "not spread": refusal(lambda: team.backward(loss, nn.Linear(1, 1), batch)),
    "no loader": refusal(lambda: team.evaluate(lambda model, batch: {}, model, [mine])),
    "no metrics": refusal(lambda: team.evaluate(lambda model, batch: batch.mean(), model, loader)),
}
everywhere = team.world.gather(told)
if team.world.is_main:
    Path(sys.argv[1]).write_text(json.dumps(everywhere))
