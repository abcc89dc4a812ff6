"""Easy digits first: epoch 1 uses the easiest 30 % of the pictures, epoch 2 60 %, epoch 3 80 %, later ones all.

python examples/curriculum.py                                              # what each epoch used, and what it learned
evenstep train examples/curriculum.py --strategy ddp --devices 2 --audit   # on two devices, every sample counted

It shows how, not that one should: shuffled, the same 85 steps learn these digits better (six seeds of six).
"""

from dataclasses import replace

import torch

import evenstep
from evenstep import Task, samplers
from evenstep.tasks import digits


def task() -> Task:
    whole = digits.task()
    easy_first = samplers.Curriculum(difficulty(*whole.train), pace=(0.3, 0.6, 0.8))
    return replace(whole, sampler=easy_first, epochs=5)


def difficulty(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How far each picture is from the mean of its digit; any numbers will do that grow with the difficulty."""
    pixels = images.flatten(1).float()
    means = torch.stack([pixels[labels == digit].mean(0) for digit in range(10)])
    return (pixels - means[labels]).norm(dim=1)


if __name__ == "__main__":
    record = evenstep.train(task, progress=False, threads=1)  # a network this small gains nothing from more
    lengths = {step.epoch: step.epoch_samples for step in record.steps}
    for evaluation in record.evaluations:
        used = f"{lengths[evaluation.epoch]} of {record.data['num_samples']} samples"
        print(f"epoch {evaluation.epoch + 1}: {used}, accuracy {evaluation.values['accuracy']:.4f}")
