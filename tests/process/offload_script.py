"""fsdp with torch's CPUOffloadPolicy on CPU ranks, where nothing can be pinned: the rest is the code that GPUs run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F

import evenstep
from evenstep.checkpoint import shards, state_dict
from evenstep.checkpoint.state_dict import whole
from evenstep.strategies.fsdp import FSDP
from evenstep.tasks.networks import GPT
from evenstep.training.fused_optimizer import fuse


class Offloaded(FSDP):
    """What `--cpu-offload` makes of fsdp on GPUs."""

    wraps_alone = True

    def _placed(self) -> dict[str, object]:
        return {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


def main(folder: Path, strategy: str) -> None:
    team = evenstep.join(strategy, precision="fp64")
    if strategy == "fsdp":
        team.strategy = Offloaded()
        # On GPUs, the devices of shards and mesh say so.
        shards.is_offloaded = state_dict.is_offloaded = lambda tensor: True  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = team.wrap(GPT(16, 8, 2, 2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fuse(optimizer, model.module)
    tokens = torch.randint(0, 16, (22, 9), generator=torch.Generator().manual_seed(0))
    loader = team.loader((tokens[:, :-1], tokens[:, 1:]), batch=8, accumulate=2)
    run = evenstep.Run(team, model, optimizer, loader)
    for epoch in range(2):
        for batch in loader:
            team.backward(
                lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()), model, batch
            )
            team.step(optimizer, clip=0.3)
        if epoch == 0:
            run.load(run.save(folder / f"{strategy}-{team.world.size}"))
    weights = {name: whole(value, keep=True) for name, value in model.module.named_parameters()}
    if team.world.is_main:
        torch.save(weights, folder / f"{strategy}-{team.world.size}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
