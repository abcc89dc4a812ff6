"""Taking an optimizer step: backward, update, schedule. What its loss was may be known a little later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenstep.data.loader import Batch
from evenstep.strategies.base import DistributedModel
from evenstep.task import Amount
from evenstep.training.loss import MeanLoss
from evenstep.training.team import Team


@dataclass(frozen=True)
class Recipe:
    """All that a step is made of, but for its batch."""

    team: Team
    loss: Callable[[Any, Any], Amount]
    model: DistributedModel
    optimizer: torch.optim.Optimizer
    clip: float | None
    scheduler: LRScheduler | None

    def advance(self, was_taken: bool = True) -> None:
        """Schedulers count the steps that were taken."""
        if was_taken and self.scheduler is not None:
            self.scheduler.step()


class Taken(Protocol):
    """A step that was taken, or is being taken by a card that the host runs ahead of."""

    def read(self) -> MeanLoss:
        """Its loss; waits for it."""


class Stepper(Protocol):
    """Takes steps, one after another."""

    lag: int
    """How many steps may be under way while the next one is begun."""
    said: list[str]
    """What there is to say about how steps are taken; whoever says it, clears it."""

    def take(self, batch: Batch) -> Taken:
        """One optimizer step."""


class Done:
    """A step that is over."""

    def __init__(self, loss: MeanLoss) -> None:
        self._loss = loss

    def read(self) -> MeanLoss:
        return self._loss


class Eager:
    """Each step by itself, its loss read before the weights change."""

    lag = 0

    def __init__(self, recipe: Recipe) -> None:
        self.said: list[str] = []
        self._recipe = recipe

    def take(self, batch: Batch) -> Taken:
        recipe = self._recipe
        loss = recipe.team.backward(recipe.loss, recipe.model, batch)
        recipe.advance(recipe.team.step(recipe.optimizer, clip=recipe.clip))
        return Done(loss)
