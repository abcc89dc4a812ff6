"""Digits of which some are rare in training: as they come, and with every digit equally often.

python examples/imbalanced.py                                                      # both, side by side
evenstep train examples/imbalanced.py:balanced --strategy ddp --devices 2          # the second, on two devices
"""

from dataclasses import replace

import torch

import evenstep
from evenstep import Task, samplers
from evenstep.tasks import digits


def plain() -> Task:
    """All training pictures of 0 to 4, and one in twenty of 5 to 9; the validation pictures stay as they are."""
    whole = digits.task()
    images, labels = whole.train
    is_rare = labels >= 5
    kept = ~is_rare | (is_rare & (is_rare.cumsum(0) % 20 == 0))
    return replace(whole, train=(images[kept], labels[kept]), metrics=accuracies)


def balanced() -> Task:
    """The same, and every digit equally often in an epoch: a rare picture comes about fourteen times."""
    task = plain()
    return replace(task, sampler=samplers.Balanced(task.train[1]))


def accuracies(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict:
    images, labels = batch
    is_right, is_rare = model(images).argmax(1) == labels, labels >= 5
    return {"accuracy": is_right, "of rare digits": ((is_right & is_rare).sum(), is_rare.sum())}


if __name__ == "__main__":
    for task in (plain, balanced):
        record = evenstep.train(task, progress=False)
        values = record.summary.valid
        print(f"{task.__name__:<8}  {len(record.steps)} steps  accuracy {values['accuracy']:.3f}  "
              f"of rare digits {values['of rare digits']:.3f}")
