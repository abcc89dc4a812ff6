"""Two ranks of fsdp under --precision bf16: which types a task, its gradients and its optimizer see."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.private_apis import fsdp_groups

seen: dict[str, str] = {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(20)
        encoder = nn.TransformerEncoderLayer(20, 2, 32, batch_first=True, dropout=0.0)
        self.blocks = nn.ModuleList([encoder, nn.Bilinear(20, 20, 20)])
        self.recurrent = nn.ModuleList([nn.LSTM(20, 20, batch_first=True)])
        self.head = nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.norm(x)[:, None])
        x = self.blocks[1](x, x)
        return self.head(self.recurrent[0](x)[0][:, -1])


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    scores = model(batch[0])
    found = F.cross_entropy(scores, batch[1])
    seen.update(input=str(batch[0].dtype), output=str(scores.dtype), loss=str(found.dtype))
    return found


def main(file: Path) -> None:
    team = evenstep.join("fsdp", precision="bf16")
    model = team.wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(32, 20, generator=generator), torch.randint(0, 5, (32,), generator=generator)
    losses = []
    for batch in team.loader(data, batch=16):
        losses.append(float(team.backward(loss, model, batch)))
        gradients = {str(weight.grad.dtype) for weight in model.parameters() if weight.grad is not None}
        team.step(optimizer)
    gathered = {name: str(group.fsdp_params[0].param_dtype) for name, _, group in fsdp_groups(model.replicas[0])}
    masters = {str(weight.dtype) for weight in model.parameters()}
    if team.world.is_main:
        found = {**seen, "gathered": gathered, "gradients": sorted(gradients), "masters": sorted(masters)}
        file.write_text(json.dumps({**found, "losses": losses}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
