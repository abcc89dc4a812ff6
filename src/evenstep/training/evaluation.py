"""What an evaluation computes of a batch: the loss and the metrics, without gradients unless they take some."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.sampling.rng import restore_rng_states, rng_states
from evenstep.task import Amount, Batch, Model, Task

T = TypeVar("T")
NEEDS_GRADIENTS = "does not require grad"
"""Part of torch's error where a gradient is needed and none is computed."""


class Means(dict[str, float]):
    """Named means over a whole data set, and over how many samples."""

    def __init__(self, values: Mapping[str, float], num_samples: int) -> None:
        super().__init__(values)
        self.num_samples = num_samples


class NamedSums:
    """Sums and counts of named values, over all micro-batches of an evaluation and all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, measured: Mapping[str, torch.Tensor]) -> None:
        """Add [sum, count] of each value of a micro-batch."""
        for name, pair in measured.items():
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def means(self) -> dict[str, float]:
        """The mean of each value, the same on all ranks, which call this together."""
        # A rank may have met no sample of a kind that another one has a name for.
        names = list(dict.fromkeys(name for of_rank in self._world.gather(list(self._sums)) for name in of_rank))
        wide = torch.float32 if self._world.device.type == "mps" else torch.float64
        table = torch.zeros(len(names), 2, dtype=wide, device=self._world.device)
        for row, name in enumerate(names if self._world.counts else ()):
            table[row] += self._sums.get(name, 0)
        work = self._world.total(table)
        if work is not None:
            work.wait()
        rows = zip(names, table.tolist(), strict=True)
        return {name: total / count if count else math.nan for name, (total, count) in rows}


class Evaluator:
    """Calls one function with gradients off; from the first time that it takes a gradient itself, with gradients on.

    A gradient penalty and the inner loop of MAML are such losses.
    """

    def __init__(self) -> None:
        self.has_succeeded = False
        """Before that, calls do not run beside each other: one that fails puts random generators back."""
        self._needs_gradients = False

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._needs_gradients or not (result := self._attempt(function, *arguments)):
            # Autocast keeps the weights that it has cast, and those of an attempt without gradients have none.
            torch.clear_autocast_cache()
            with torch.enable_grad():
                result = [function(*arguments)]
        self.has_succeeded = True
        return result[0]

    def _attempt(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """What the function returns with gradients off, in a list; an empty one if it needs them."""
        before = None if self.has_succeeded else rng_states()
        try:
            with torch.no_grad():
                return [function(*arguments)]
        except RuntimeError as error:
            if NEEDS_GRADIENTS not in str(error):
                raise
        if before is not None:
            restore_rng_states(before)
        self._needs_gradients = True
        return []


class LossAndMetrics:
    """Every value that an evaluation of a Task is to have, by name; each decides for itself on gradients."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._evaluate_loss, self._evaluate_metrics = Evaluator(), Evaluator()

    def __call__(self, model: Model, batch: Batch) -> dict[str, Amount]:
        task = self._task
        more: Mapping[str, Amount] = {}
        if task.metrics is not None:
            more = named(self._evaluate_metrics(task.metrics, model, batch))
        if "loss" in more:
            return {"loss": more["loss"], **more}
        # That of several models has more than one name.
        found = self._evaluate_loss(getattr(task.loss, "evaluated", task.loss), model, batch)
        return {**found, **more} if isinstance(found, Mapping) else {"loss": found, **more}


def prefixed(set_name: str, name: str) -> str:
    """The name of a value, with that of its validation set, if the set has one."""
    return f"{set_name}/{name}" if set_name else name


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
