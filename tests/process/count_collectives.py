"""One rank of a training that counts what it sends; `python count_collectives.py [complex] OUT`."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.distributed.shm.allreduce import Channel, ScalarAllReduce

counts = dict.fromkeys(["steps", "micro_batches", "averages", "letters", "other_collectives"], 0)


def counted(where: object, name: str, key: str) -> None:
    real = getattr(where, name)

    def call(*arguments: object, **options: object) -> object:
        counts[key] += 1
        return real(*arguments, **options)

    setattr(where, name, call)


team = evenstep.join("ddp", devices=("cpu", "cpu"))


class Spectral(nn.Module):
    """A complex parameter, whose gradient torch's DDP averages."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6)


first = Spectral() if "complex" in sys.argv else nn.Identity()
model = team.wrap(nn.Sequential(first, nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = team.loader((torch.randn(90, 6), torch.randint(0, 3, (90,))), batch=10, accumulate=3)
counted(Channel, "average", "averages")
counted(ScalarAllReduce, "post", "letters")
for name in ("all_reduce", "all_gather", "broadcast", "barrier", "reduce", "reduce_scatter_tensor"):
    counted(dist, name, "other_collectives")
for batch in loader:
    team.backward(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), model, batch)
    team.step(optimizer)
    counts["steps"] += 1
    counts["micro_batches"] += len(batch.micro_batches)
if team.world.is_main:
    Path(sys.argv[-1]).write_text(json.dumps(counts))
