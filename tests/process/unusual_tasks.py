"""Tasks that ask much of fsdp, mostly too much; `evenstep train unusual_tasks.py:heads` is one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from evenstep import Task

NUM_SAMPLES = 40
X = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(NUM_SAMPLES) % 2


def task_of(model: Callable[[], nn.Module]) -> Task:
    return Task(
        model=model,
        train=(X, Y),
        valid=(X[:11], Y[:11]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
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


class Teacher(nn.Module):
    """A second layer that follows the first, as a parameter: fsdp would lose what forward writes there."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 2), nn.Linear(6, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        return self.student(x) + self.teacher(x)


def teacher() -> Task:
    return task_of(Teacher)


class Momentum(nn.Module):
    """MoCo's key encoder: an average of a layer's weights, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        self.register_buffer("average", self.layers[0].weight.detach().clone())

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.lerp_(self.layers[0].weight, 0.1)
        key = F.linear(other, self.average)
        apart: torch.Tensor = (self.layers(one) - self.layers[1](key)).square().mean()
        return apart


def two_views() -> Task:
    def views(sample: tuple[torch.Tensor, int], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return tuple(sample[0] + 0.1 * torch.randn(6, generator=generator) for _ in range(2))

    return replace(task_of(Momentum), valid=None, augment=views, loss=lambda model, batch: model(batch[0], batch[1]))


class Complex(nn.Module):
    """A complex parameter, which torch's optimizers do not train where it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))
        return found


def complex_weights() -> Task:
    return task_of(Complex)
