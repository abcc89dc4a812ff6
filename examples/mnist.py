"""MNIST from a file of your own; DIR holds the four official .gz files.

evenstep train examples/mnist.py --data DIR                                # one device
evenstep train examples/mnist.py --data DIR --strategy ddp --devices 2     # two: the same steps, the same result
python examples/mnist.py DIR                                               # the same from Python
"""

import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep import Task


def load(folder: str, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = gzip.decompress(Path(folder, f"{split}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress(Path(folder, f"{split}-labels-idx1-ubyte.gz").read_bytes())
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 784) / np.float32(255)
    return torch.from_numpy(pixels), torch.from_numpy(np.frombuffer(labels, np.uint8, offset=8).astype(np.int64))


def task(data: str) -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        train=load(data, "train"),
        valid=load(data, "t10k"),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch=128,
        epochs=3,
    )


if __name__ == "__main__":
    record = evenstep.train(task, strategy="ddp", devices=2, data=sys.argv[1])
    print(record.summary.valid)
