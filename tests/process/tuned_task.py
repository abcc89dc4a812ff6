"""A small task with options: trials of `evenstep tune` train it in a blink; some of them can be made to fail."""

from __future__ import annotations

import os
import time
from typing import Annotated

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from evenstep import Task


def task(
    lr: Annotated[float, "1e-3..1:log"] = 0.1, width: int = 4, failing_width: int = 0, seconds: float = 0.0
) -> Task:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 5, generator=generator)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(96, 1, generator=generator)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        # Not where it is checked before a training starts.
        if width == failing_width and "RANK" in os.environ:
            raise ValueError(f"width {width} does not work")
        time.sleep(seconds)
        return (model(batch[0]) - batch[1]).square().mean()

    return Task(
        model=lambda: nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1)),
        train=(x[:64], y[:64]),
        valid=(x[64:], y[64:]),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        scheduler=lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 1 - step / num_steps),
        batch=16,
        epochs=4,
    )
