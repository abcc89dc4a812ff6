"""Digits of which some are rare in training: as they come, and with every digit equally often.

python examples/imbalanced.py                                                  # both, the same number of steps
evenstep train examples/imbalanced.py:balanced --strategy ddp --devices 2      # the second one, on two devices
"""

from dataclasses import replace

import torch

import evenstep
from evenstep import Task, samplers
from evenstep.tasks import digits


def plain() -> Task:
    """All training pictures of 0 to 4 and one in twenty of 5 to 9; the validation pictures stay as they are."""
    whole = digits.task()
    images, labels = whole.train
    is_rare = labels >= 5
    is_kept = ~is_rare | (is_rare.cumsum(0) % 20 == 0)
    return replace(whole, train=(images[is_kept], labels[is_kept]), metrics=accuracies)


def balanced() -> Task:
    """The same pictures, model and steps; every digit equally often, so that each rare picture comes many times."""
    task = plain()
    return replace(task, sampler=samplers.Balanced(task.train[1]))


def accuracies(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict:
    images, labels = batch
    is_right, is_rare = model(images).argmax(1) == labels, labels >= 5
    return {"accuracy": is_right, "of rare digits": ((is_right & is_rare).sum(), is_rare.sum())}


if __name__ == "__main__":
    for task in (plain, balanced):
        record = evenstep.train(task, progress=False, threads=1)  # a network this small gains nothing from more
        shown = "  ".join(f"{name} {value:.4f}" for name, value in record.summary.valid.items())
        print(f"{task.__name__:<8}  {len(record.steps)} steps  {shown}")
