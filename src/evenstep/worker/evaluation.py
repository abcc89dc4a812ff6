"""What an evaluation computes of a batch: the loss and the metrics, without gradients unless they take some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from evenstep.errors import TaskError
from evenstep.seeding import generator_states, restore_generators
from evenstep.task import Amount, Batch, Model, Task

T = TypeVar("T")
NEEDS_GRADIENTS = "does not require grad"
"""In what torch says when a gradient is taken where none is computed."""


class Evaluator:
    """Calls a function with gradients off; from the first time that it takes a gradient itself, with gradients on.

    A gradient penalty and the inner loop of MAML are such losses.
    """

    def __init__(self) -> None:
        self._needs_gradients = False

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        if not self._needs_gradients:
            before = generator_states()
            try:
                with torch.no_grad():
                    return function(*arguments)
            except RuntimeError as error:
                if NEEDS_GRADIENTS not in str(error):
                    raise
            # As if the first attempt had not been: a resumed run may make it where an undisturbed one did not.
            restore_generators(before)
            self._needs_gradients = True
        with torch.enable_grad():
            return function(*arguments)


def loss_and_metrics(task: Task, model: Model, batch: Batch) -> dict[str, Amount]:
    """Every value that an evaluation of a Task is to have, by name."""
    more = named(task.metrics(model, batch)) if task.metrics is not None else {}
    return {"loss": task.loss(model, batch), **more}


def named(values: Any) -> Mapping[str, Amount]:
    """What metrics returned, if it is what they may return."""
    if not isinstance(values, Mapping):
        raise TaskError(
            f"metrics returned a {type(values).__name__}; "
            "return a dict of named values: {'accuracy': correct.float()}"
        )
    for name, value in values.items():
        if not isinstance(value, torch.Tensor | int | float | tuple | list | np.ndarray | np.generic):
            raise TaskError(
                f"the metric {name!r} is a {type(value).__name__}; give one value per sample, a mean, "
                "or a pair (sum, count)"
            )
    return values
