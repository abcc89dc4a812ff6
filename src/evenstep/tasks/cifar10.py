"""CIFAR-10: 50,000 + 10,000 colour images, 32x32, in the binary version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from evenstep.errors import TaskError
from evenstep.task import Task
from evenstep.tasks.download import Official, find, verified
from evenstep.tasks.networks import Net, Normalize, ResNet18

CIFAR10 = Official(
    name="cifar10",
    md5={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
    inner="cifar-10-batches-bin",
)
RECORD_BYTES = 1 + 3 * 32 * 32
WARM_UP_STEPS = 1000


def task(data: str | None = None) -> Task:
    """Ten classes; the small net of PyTorch's tutorial reaches more than 60 % accuracy."""
    train, valid = _images(data)
    return Task(
        model=lambda: Net(_normalize()),
        train=train,
        valid=valid,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        scheduler=lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 1 - step / num_steps),
        batch=128,
        epochs=10,
    )


def resnet18(data: str | None = None) -> Task:
    """The same images for a ResNet-18; made for a GPU, where an epoch takes seconds."""
    return replace(
        task(data),
        model=lambda: ResNet18(_normalize()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4),
        scheduler=lambda optimizer, num_steps: LambdaLR(
            optimizer, lambda step: min((step + 1) / WARM_UP_STEPS, 1 - step / num_steps)
        ),
        epochs=15,
    )


def read_records(content: bytes, path: Path) -> tuple[Tensor, Tensor]:
    """The images (n x 3 x 32 x 32) and labels of one batch file."""
    if not content or len(content) % RECORD_BYTES:
        raise TaskError(f"{path} has {len(content)} bytes, not a multiple of {RECORD_BYTES} per image; replace it")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, RECORD_BYTES)
    labels = records[:, 0].long()
    if labels.max() > 9:
        raise TaskError(f"{path} has a label {int(labels.max())}, allowed are 0 to 9; is it CIFAR-100? replace it")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def _images(data: str | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    paths = find(CIFAR10, data)
    *train, valid = (read_records(verified(path, CIFAR10.md5[name]), path) for name, path in paths.items())
    return (torch.cat([images for images, _ in train]), torch.cat([labels for _, labels in train])), valid


def _normalize() -> Normalize:
    return Normalize([125.307, 122.950, 113.865], [62.993, 62.089, 66.705])
