"""What bench/tune.py searches: digits by a small network of linear layers, and by a small CNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from evenstep import Task
from evenstep.tasks.digits import _images, hold_out


def _task(model: Callable[[], nn.Module], lr: float, momentum: float, decay: float) -> Task:
    images, labels = _images()
    held_out = hold_out(labels)
    x = images.float().unsqueeze(1) / 16
    return Task(
        model=model,
        train=(x[~held_out], labels[~held_out]),
        valid=(x[held_out], labels[held_out]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=decay),
        scheduler=lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 1 - step / num_steps),
        batch=64,
        epochs=9,
    )


def digits(
    lr: Annotated[float, "1e-3..3:log"] = 0.1,
    width: Annotated[int, "16,32,64,128"] = 64,
    momentum: Annotated[float, "0..0.95"] = 0.9,
    decay: Annotated[float, "1e-6..1e-2:log"] = 1e-4,
) -> Task:
    """Two hidden layers."""

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    return _task(network, lr, momentum, decay)


def cnn(
    lr: Annotated[float, "1e-3..3:log"] = 0.1,
    channels: Annotated[int, "4,8,16"] = 8,
    momentum: Annotated[float, "0..0.95"] = 0.9,
    decay: Annotated[float, "1e-6..1e-2:log"] = 1e-4,
    dropout: Annotated[float, "0..0.5"] = 0.0,
) -> Task:
    """Two convolutions and one linear layer."""

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * 16, 10),
        )

    return _task(network, lr, momentum, decay)
