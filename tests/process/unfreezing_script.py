"""One rank of a loop that freezes and unfreezes layers between steps; `python unfreezing_script.py OUT STRATEGY`."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.checkpoint.state_dict import weights, whole
from evenstep.distributed.collective_check import check_collectives

out, strategy = Path(sys.argv[1]), sys.argv[2]
team = evenstep.join(
    strategy.removesuffix("+torch"), devices=("cpu",) if strategy == "single" else ("cpu", "cpu"), precision="fp64"
)
if strategy.endswith("+torch"):
    check_collectives(team.world)  # which sees torch's DDP, and no shared memory
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
net[2].requires_grad_(False)
model = team.wrap(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
generator = torch.Generator().manual_seed(5)
data = torch.randn(90, 6, generator=generator), torch.randint(0, 3, (90,), generator=generator)


def set_trained(*layers: str) -> None:
    for name, weight in model.module.named_parameters():
        weight.requires_grad_(name.partition(".")[0] in layers)


for epoch, layers in enumerate([("0", "4"), ("2", "4"), ("0", "2", "4"), ("0",)]):
    set_trained(*layers)
    for batch in team.loader(data, batch=9 + epoch):
        team.backward(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), model, batch)
        team.step(optimizer)
found = {name: whole(value, keep=True) for name, value in weights(model.module).items()}
if team.world.is_main:
    save_file(found, out)
