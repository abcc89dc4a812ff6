"""One device that starts next to where it should: how far does that alone take it?

Where a ReLU, a max-pool or a comparison decides, the last digit of a weight can turn the decision, and a gradient
jumps. A batch that is cut up is rounded otherwise, so that a sound way may jump where one device does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from evenstep.plan import Plan
from evenstep.task import Task
from evenstep.worker.job import Event
from evenstep.worker.witness import Norms, perform_watched

STRENGTH = 2.0**-19
"""How far a weight is moved at most, relative to itself: the last four bits of a float32, about what sums lose."""
LEAST = {"fp64": 1e-5, "fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
"""What rounding may do to any tensor, relative to its size, where a task does not compute in float64 throughout."""
MOST_TRIED = 10
"""Of five decisions that rounding had turned (CIFAR-10), disturbances of half and of twice this strength turned each
again in a third to nearly all of the tries: ten in vain are rare."""


def perform_disturbed(plan: Plan, task: Task, run_folder: Path, *, norms: Norms, number: int) -> Iterator[Event]:
    """`perform_watched` from weights that are off by next to nothing, in another direction for every number."""
    beside = replace(task, model=lambda: disturbed(task.model(), number))
    yield from perform_watched(plan, beside, run_folder, norms=norms)


@torch.no_grad()
def disturbed(model: nn.Module, number: int) -> nn.Module:
    """The same model; every weight is moved by a random part of STRENGTH, or by a last digit if that is more."""
    # Its own, so that nothing else is drawn otherwise than without it.
    draws = torch.Generator().manual_seed(number)
    for weight in model.parameters():
        if weight.is_floating_point() or weight.is_complex():
            strength = max(STRENGTH, torch.finfo(weight.dtype).eps)
            weight.mul_(1 + strength * (2 * torch.rand(weight.shape, generator=draws) - 1).to(weight.device))
    return model
