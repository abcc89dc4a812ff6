"""A small training, of which a run from before the move into rooms is kept beside this file."""

import torch
from torch import nn
from torch.nn import functional as F

from evenstep import Task, samplers

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float()}


def task(sampler: object = None) -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2)),
        train=(x, y),
        valid=(x[:20], y[:20]),
        loss=loss,
        metrics=accuracy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7),
        sampler=sampler,
        batch=6,
    )


def weighted() -> Task:
    return task(samplers.Weighted(torch.arange(1.0, 61.0)))
