"""A rank of two whose run folders are not the same one, as on two machines: some steps, traced.

Prints nothing; what there is to say is written beside the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import evenstep
from evenstep.distributed.heartbeat import INPUT
from evenstep.profiling.profiler import Tracing

team = evenstep.join("ddp", ["cpu", "cpu"])
folder = Path(sys.argv[1]) / f"machine{team.world.rank}"
folder.mkdir()
model = team.wrap(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tracing = Tracing(2, team.world, folder, 0, 5)
said: list[str] = []
for step, batch in enumerate(team.loader((torch.randn(20, 8),), batch=4), 1):
    team.world.heartbeat.step = step
    team.world.spans.begin(INPUT)
    team.backward(lambda model, batch: model(batch[0]).square().mean(), model, batch)
    team.step(optimizer)
    said += tracing.after(step)
(folder / "said").write_text("\n".join(said))
