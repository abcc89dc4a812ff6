"""Tasks that fsdp or its optimizers stumble over; `evenstep train unusual_tasks.py:heads` is one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from evenstep import Task

NUM_SAMPLES = 40
X = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(NUM_SAMPLES) % 2

Parameters = Iterable[nn.Parameter]


def task_of(model: Callable[[], nn.Module], optimizer: Callable[[Parameters], Any] | None = None) -> Task:
    return Task(
        model=model,
        train=(X, Y),
        valid=(X[:11], Y[:11]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)),
        batch=8,
        epochs=2,
    )


class Heads(nn.Module):
    """Two heads, of which a batch uses one: on two ranks, one each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 7)
        self.one = nn.Linear(7, 2)
        self.other = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        return self.one(hidden) if x.sum() > 0 else self.other(hidden)


def heads() -> Task:
    return task_of(Heads)


class Experts(nn.Module):
    """Units of different sizes, of which a batch runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 2)) for width in (3, 5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = self.experts[int(100 * x.abs().sum()) % 3](x)
        return chosen


def experts() -> Task:
    return task_of(Experts)


class Later(nn.Module):
    """A head that all ranks begin to use at the eighth forward: nothing is wrong with that."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 2), nn.Linear(6, 2)
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        return self.one(x) + self.other(x) if self.num_forwards > 7 else self.one(x)


def later() -> Task:
    return task_of(Later)


def later_by(optimizer: str) -> Task:
    return task_of(Later, OPTIMIZERS[optimizer])


OPTIMIZERS: dict[str, Callable[[Parameters], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "dampened": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}
