"""The small convolutional net of PyTorch's tutorial on CIFAR-10, with flipped pictures; DIR holds the .bin files.

evenstep train examples/cifar10.py --data DIR --strategy ddp --devices 2 --epochs 10
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from evenstep import Task


def load(folder: str, pattern: str) -> tuple[torch.Tensor, torch.Tensor]:
    records = np.concatenate([np.fromfile(file, np.uint8) for file in sorted(Path(folder).glob(pattern))])
    records = records.reshape(-1, 1 + 3 * 32 * 32)  # a label, then three planes
    return torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32)), torch.from_numpy(records[:, 0].astype(np.int64))


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def scaled(pictures: torch.Tensor) -> torch.Tensor:
    return pictures.float() / 127.5 - 1


def flip(sample: tuple[torch.Tensor, torch.Tensor], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The generator depends on the sample and the epoch: the same picture on any number of devices."""
    picture, label = sample
    return (picture.flip(-1) if torch.rand((), generator=generator) < 0.5 else picture), label


def task(data: str) -> Task:
    return Task(
        model=net,
        train=load(data, "data_batch_*.bin"),
        valid=load(data, "test_batch.bin"),
        augment=flip,
        loss=lambda model, batch: F.cross_entropy(model(scaled(batch[0])), batch[1]),
        metrics=lambda model, batch: {"accuracy": model(scaled(batch[0])).argmax(1) == batch[1]},
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch=128,
        epochs=10,
    )
