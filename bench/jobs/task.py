"""The same job as a task of evenstep: `evenstep train bench/jobs/task.py --data FOLDER --devices 2 --epochs 2`."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from evenstep import Task

sys.path.insert(0, str(Path(__file__).parent))

from pictures import BATCH_A_RANK, DEVIATION, MEAN, RANKS, SimpleNet, read


def scaled(pixels):
    return pixels.float().div(255).sub(MEAN).div(DEVIATION)


def task(data):
    return Task(
        model=SimpleNet,
        train=read(data, "train"),
        valid=read(data, "t10k"),
        loss=lambda model, batch: F.cross_entropy(model(scaled(batch[0])), batch[1]),
        metrics=lambda model, batch: {"accuracy": model(scaled(batch[0])).argmax(1) == batch[1]},
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch=RANKS * BATCH_A_RANK,
    )
