"""Tasks of what other trainers were given: `adopt.trainer` (transformers) and `adopt.lightning`.

def make_trainer():
    return transformers.Trainer(model=model, args=arguments, train_dataset=data)

def task():
    return evenstep.adopt.trainer(make_trainer)

`evenstep adopt my_task.py` compares the first steps with those of the original, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evenstep.task import Task


def trainer(make: Callable[[], Any]) -> Task:
    """The task of a Trainer of transformers: a function that makes it, or the Trainer itself.

    Several processes need the function: a Trainer that is made in one of them would start a process group of its own.
    """
    from evenstep.adopt.hf_trainer import adopt_trainer

    return adopt_trainer(make)


def lightning(module: Any, datamodule: Any = None) -> Task:
    """The task of a LightningModule, with its LightningDataModule, its DataLoader, or its own train_dataloader."""
    from evenstep.adopt.lightning_module import adopt_lightning

    return adopt_lightning(module, datamodule)
