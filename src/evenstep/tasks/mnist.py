"""MNIST and Fashion-MNIST: 60,000 + 10,000 grey images, 28x28, in the IDX format."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from evenstep.errors import TaskError
from evenstep.task import Task
from evenstep.tasks.download import Official, find, verified
from evenstep.tasks.networks import Normalize, SimpleNet

MNIST = Official(
    name="mnist",
    md5={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    suffix=".gz",
)
FASHION_MNIST = Official(
    name="fashion-mnist",
    md5={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    suffix=".gz",
    also=("/usr/share/datasets/fashion-mnist",),
)


def mnist(data: str | None = None) -> Task:
    """Handwritten digits; one hidden layer reaches more than 97 % accuracy."""
    return _task(MNIST, data, mean=0.1307 * 255, deviation=0.3081 * 255)


def fashion_mnist(data: str | None = None) -> Task:
    """Clothing; one hidden layer reaches more than 87 % accuracy."""
    return _task(FASHION_MNIST, data, mean=0.2860 * 255, deviation=0.3530 * 255)


def read_idx(content: bytes, path: Path) -> Tensor:
    """The bytes of an IDX file as a tensor: images (n x rows x columns) or labels (n)."""
    num_dimensions = content[3] if len(content) >= 4 else 0
    if content[:3] != b"\x00\x00\x08" or num_dimensions == 0:
        raise TaskError(f"{path} begins with {content[:4].hex(' ')}, an IDX file of bytes with 00 00 08; replace it")
    start = 4 + 4 * num_dimensions
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        sizes = " x ".join(map(str, shape))
        raise TaskError(f"{path} has {len(content)} bytes, but {sizes} need {start + math.prod(shape)}; replace it")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].view(shape)


def _task(official: Official, data: str | None, mean: float, deviation: float) -> Task:
    paths = find(official, data)
    tensors = [read_idx(verified(path, official.md5[name]), path) for name, path in paths.items()]
    train_images, train_labels, valid_images, valid_labels = tensors
    return Task(
        model=lambda: SimpleNet(Normalize([mean], [deviation])),
        train=(train_images, train_labels.long()),
        valid=(valid_images, valid_labels.long()),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        scheduler=lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 1 - step / num_steps),
        batch=128,
        epochs=5,
    )
