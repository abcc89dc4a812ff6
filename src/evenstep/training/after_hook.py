"""What `Task.after` is called with: a training between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evenstep.errors import TaskError
from evenstep.task import Task


def check_after(task: Task) -> None:
    """Refuse a Task whose `after` and `after_every` do not go together."""
    if task.after_every is not None and task.after is None:
        raise TaskError("after_every says how often `after` is called, and there is none; give Task(after=function)")
    if task.after_every is not None and task.after_every < 1:
        raise TaskError(f"after_every is {task.after_every}; it is a number of steps from 1 up")


@dataclass(frozen=True, kw_only=True)
class BetweenSteps:
    """A training between two steps, on each rank; what it changes is trained from the next step on."""

    model: Any
    """The user's model (a dict of several): unfreeze a layer, read a weight."""
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
    step: int
    """The number of steps taken."""
    epoch: int
    """That of the last step, from 0."""
    loss: float
    """Of the last step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those of the evaluation after this step, if there was one."""
    folder: Path
    """Of the run."""
    rank: int
    """0 writes files and prints."""
    infer: Callable[[Callable[[Any], Any]], Any]
    """`run.infer(lambda model: model(x))`: without gradients, in eval mode; all ranks call it."""
