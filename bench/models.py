"""What is trained in every race: a network, random data of its shape, a loss, a global batch; defined once for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep.tasks.networks import GPT

Columns = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Work:
    """One training, the same for everybody who races."""

    name: str
    network: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Columns]
    batch: int
    """Over all ranks."""
    rows: int = 8192

    def model(self) -> nn.Module:
        """The same weights at every call."""
        torch.manual_seed(0)
        return self.network()

    def columns(self) -> Columns:
        """The same random samples at every call."""
        return self.draw(self.rows, torch.Generator().manual_seed(0))

    def loss(self, model: Callable[[Tensor], Tensor], batch: Columns) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    def optimizer(self, model: nn.Module, is_fused: bool) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3, fused=is_fused or None)


def mlp(*widths: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cifar_net() -> nn.Module:
    """The small network of PyTorch's CIFAR-10 tutorial."""
    convolutions = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    linears = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, nn.Flatten(), *linears)


def pictures(*shape: int, classes: int = 10) -> Callable[[int, torch.Generator], Columns]:
    """Random numbers of a shape, and a label each."""

    def draw(rows: int, generator: torch.Generator) -> Columns:
        return torch.randn(rows, *shape, generator=generator), torch.randint(classes, (rows,), generator=generator)

    return draw


def tokens(vocabulary: int, context: int) -> Callable[[int, torch.Generator], Columns]:
    """Random texts, and what follows each of their symbols."""

    def draw(rows: int, generator: torch.Generator) -> Columns:
        text = torch.randint(vocabulary, (rows, context + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return draw


MLP = Work("MLP 20-64-5, batch 256", lambda: mlp(20, 64, 5), pictures(20, classes=5), 256, rows=2**17)
SIMPLE_NET = Work("SimpleNet 784-256-10, batch 128", lambda: mlp(784, 256, 10), pictures(784), 128)
CIFAR_NET = Work("small CIFAR net, batch 128", cifar_net, pictures(3, 32, 32), 128)
MLP_10M = Work("MLP of 10M, batch 128", lambda: mlp(1024, 2048, 3072, 512, 10), pictures(1024), 128)
SMALL_GPT = Work(
    "small GPT (4 x 128, 128 tokens), batch 16",
    lambda: GPT(65, 128, layers=4, heads=4, width=128),
    tokens(65, 128),
    16,
    rows=1024,
)
WORKS = (MLP, SIMPLE_NET, CIFAR_NET, MLP_10M, SMALL_GPT)


def num_parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())
