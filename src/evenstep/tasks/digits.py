"""Handwritten digits, 8x8, from the installed scikit-learn: no download needed."""

from __future__ import annotations

from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from evenstep.errors import TaskError
from evenstep.task import Task
from evenstep.tasks.networks import Normalize


class ImageConv2d(nn.Conv2d):
    """A convolution of images as bytes, which it normalizes."""

    def __init__(self) -> None:
        super().__init__(1, 16, 3, padding=1)
        self.normalize = Normalize([4.88], [6.02])

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.normalize(images.unsqueeze(1), self.weight))


class DigitNet(nn.Sequential):
    """Two convolutions and two linear layers, for images of 8x8; in a row, so that a pipeline can cut it."""

    def __init__(self) -> None:
        layers = OrderedDict[str, nn.Module](
            conv1=ImageConv2d(),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            hidden=nn.Linear(32 * 4 * 4, 64),
            relu3=nn.ReLU(),
            output=nn.Linear(64, 10),
        )
        super().__init__(layers)


def task() -> Task:
    """Digits 0 to 9 in 1,797 small images; a fifth of each digit is held out."""
    images, labels = _images()
    held_out = hold_out(labels)
    return Task(
        model=DigitNet,
        train=(images[~held_out], labels[~held_out]),
        valid=(images[held_out], labels[held_out]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        scheduler=lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 1 - step / num_steps),
        batch=64,
        epochs=12,
    )


def hold_out(labels: Tensor) -> Tensor:
    """Which samples are held out: a fifth of each label, always the same ones."""
    # A separate generator: the split must not change with the seed of the run.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in set(labels.tolist()):
        own = order[labels[order] == label]
        held_out[own[: round(len(own) / 5)]] = True
    return held_out


def _images() -> tuple[Tensor, Tensor]:
    installed = find_spec("sklearn")
    if installed is None or installed.origin is None:
        raise TaskError("digits needs scikit-learn: pip install 'evenstep[demo]'")
    # The file that load_digits reads: importing scikit-learn takes seconds, and every worker would wait for it.
    path = Path(installed.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        table = numpy.loadtxt(path, delimiter=",", dtype=numpy.uint8)
    else:
        from sklearn.datasets import load_digits

        table = numpy.column_stack(load_digits(return_X_y=True)).astype(numpy.uint8)
    return torch.from_numpy(table[:, :64].reshape(-1, 8, 8)), torch.from_numpy(table[:, 64]).long()
