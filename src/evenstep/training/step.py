"""One optimizer step: backward, update, scheduler. On a GPU its loss may be read some steps later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenstep.checkpoint.shards import is_sharded
from evenstep.data.loader import Batch
from evenstep.distributed.preemption import Requests
from evenstep.strategies.base import DistributedModel
from evenstep.task import Amount
from evenstep.training.host_copy import HostCopy
from evenstep.training.loss_weighting import MeanLoss
from evenstep.training.lr_scheduler import Schedulers
from evenstep.training.optimizer_step import WeightUpdate
from evenstep.training.team import Team

if TYPE_CHECKING:
    from evenstep.training.ema import WeightAverage


@dataclass(frozen=True)
class Recipe:
    """What a step needs besides its batch."""

    team: Team
    loss: Callable[[Any, Any], Amount]
    model: DistributedModel
    optimizer: torch.optim.Optimizer
    clip: float | None
    scheduler: LRScheduler | Schedulers | None
    is_scheduled: bool = True
    """Whether every step is one of the scheduler; others count epochs or evaluations."""
    average: WeightAverage | None = None

    def advance(self, was_taken: bool = True) -> None:
        """Step the scheduler and the average of weights, unless fp16's GradScaler skipped the optimizer step."""
        if was_taken and self.scheduler is not None and self.is_scheduled:
            self.scheduler.step()
        if was_taken and self.average is not None:
            self.average.update()


class Taken(Protocol):
    """A step that is done, or still running on a GPU that the host runs ahead of."""

    def read(self) -> MeanLoss:
        """Wait for its loss."""


class Stepper(Protocol):
    """Takes one step after another."""

    lag: int
    """How many steps may still be running when the next one starts."""
    messages: list[str]
    """What to log about how steps are taken; the reader clears it."""

    def take(self, batch: Batch) -> Taken:
        """One optimizer step."""

    def recheck(self) -> None:
        """What a step does may have been changed between two of them."""


class Done:
    """A step whose loss is known."""

    def __init__(self, loss: MeanLoss, update: WeightUpdate) -> None:
        self._loss = loss
        self._norm = HostCopy(update.grad_norm) if update.grad_norm is not None else None

    def read(self) -> MeanLoss:
        if self._norm is not None:
            self._loss.grad_norm, self._norm = self._norm.read(), None
        return self._loss


class AgreedLater:
    """A step whose requests count when it is read: steps before it are still to be read, here or on other ranks."""

    def __init__(self, taken: Taken, requests: Requests) -> None:
        self._taken, self._requests, self._agreed = taken, requests, requests.agreed

    def read(self) -> MeanLoss:
        self._requests.agreed = self._agreed
        return self._taken.read()


def agreed_when_read(requests: Requests, take: Callable[[], Taken]) -> Taken:
    """A step that reads its loss at once, among others whose losses are read later."""
    before = requests.agreed
    taken = AgreedLater(take(), requests)
    requests.agreed = before
    return taken


class Eager:
    """Eager steps; the loss is read before the weights change."""

    def __init__(self, recipe: Recipe) -> None:
        self.messages: list[str] = []
        self._recipe = recipe
        # On a GPU, the norm of a step's gradients is known when the next one has begun.
        self.lag = int(recipe.clip is not None and recipe.team.world.device.type == "cuda")

    def recheck(self) -> None:
        pass

    def settle(self) -> None:
        """Read the losses of all steps; here they are known."""

    def take(self, batch: Batch) -> Taken:
        loss = self.backward(batch)
        return Done(loss, self.update())

    def backward(self, batch: Batch) -> MeanLoss:
        """The first half: gradients and loss."""
        return self._recipe.team.backward(self._recipe.loss, self._recipe.model, batch)

    def update(self) -> WeightUpdate:
        """The second half."""
        recipe = self._recipe
        update = recipe.team.step(recipe.optimizer, clip=recipe.clip)
        recipe.advance(bool(update))
        return update


def eager_steps(recipe: Recipe) -> Eager:
    """Eager steps; on GPUs, those whose losses can be read late."""
    if not reads_late(recipe.team, recipe.model.weights):
        return Eager(recipe)
    from evenstep.training.deferred_loss import LateSteps

    return LateSteps(recipe)


def reads_late(team: Team, weights: Iterable[torch.Tensor]) -> bool:
    """Whether losses may be read late: on GPUs, as far as the optimizer allows it.

    fp16's GradScaler skips steps, which schedulers do not count: they need to know before the next one. The losses of
    virtual replicas are summed on the host. Ranks that compute one replica together clip by a norm of all of them.
    """
    world = team.world
    is_on_gpus = all(device.type == "cuda" for device in world.devices)
    is_plain = team.precision.scaler is None and world.num_virtual is None and world.ranks_per_replica == 1
    return is_on_gpus and is_plain and not any(map(is_sharded, weights))
