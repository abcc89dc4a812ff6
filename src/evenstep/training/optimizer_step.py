"""The optimizer step: fp16's loss scale, clipping, the update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.checkpoint.shards import is_any_sharded
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.private_apis import infinity_flags
from evenstep.strategies.base import NOTHING, forget_gradients, is_bare, update
from evenstep.task import takes_model
from evenstep.training.clipping import clip_gradients
from evenstep.training.fused_optimizer import FusedAdam, is_fused, start_momentum
from evenstep.training.precision import unscale, update_scale

if TYPE_CHECKING:
    from evenstep.training.whole_matrix_update import WholeUpdates


def make_optimizer(function: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    """`optimizer(parameters)` or `optimizer(model)`, as the function takes it; the model's names are the user's own."""
    made = function(model if takes_model(function) else model.parameters())
    if not hasattr(made, "param_groups"):
        raise TaskError(f"Task.optimizer returned a {type(made).__name__}; it must return a torch.optim.Optimizer")
    return made


class WeightUpdate(int):
    """Whether the weights were updated, as an int: 0 if fp16's GradScaler skipped it. It knows the `grad_norm`."""

    grad_norm: torch.Tensor | None
    """Before clipping, on the device; None where nothing is clipped."""

    def __new__(cls, was_taken: bool, grad_norm: torch.Tensor | None) -> WeightUpdate:
        self = super().__new__(cls, was_taken)
        self.grad_norm = grad_norm
        return self


@dataclass(frozen=True)
class UpdateSettings:
    """What an update depends on beside the optimizer."""

    scaler: torch.amp.GradScaler | None = None
    is_exact: bool = False
    """Whether it is to have the same bits wherever the parameters are."""
    ranks: World | None = None
    """Those that hold parts of one replica each."""
    whole: WholeUpdates | None = None
    """How sharded parameters are updated that the optimizer needs whole."""
    adam: FusedAdam | None = None
    """What takes the steps of a fused Adam sooner than torch."""


def step_optimizer(optimizer: Optimizer, clip: float | None, settings: UpdateSettings) -> WeightUpdate:
    """Clip the gradients to a total norm, update the weights, drop the gradients."""
    scaler, is_exact = settings.scaler, settings.is_exact
    if scaler is not None:
        unscale(optimizer, scaler)
    norm = clip_gradients(optimizer, clip, is_exact=is_exact, ranks=settings.ranks) if clip is not None else None
    start_momentum(optimizer)
    around = _same_on_shards(optimizer) if is_exact else NOTHING
    with around:
        if scaler is None:
            _update(optimizer, settings)
        elif settings.whole is None:
            scaler.step(optimizer)
        elif not any(flag.item() for flag in infinity_flags(scaler, optimizer)):
            settings.whole.step(optimizer)
    taken = update_scale(scaler) if scaler is not None else True
    forget_gradients(optimizer)
    return WeightUpdate(taken, norm)


def _update(optimizer: Optimizer, settings: UpdateSettings) -> None:
    if settings.whole is not None:
        settings.whole.step(optimizer)
    elif settings.adam is None or not is_bare(optimizer) or not settings.adam.step(optimizer):
        update(optimizer)


def _same_on_shards(optimizer: Optimizer) -> AbstractContextManager[Any]:
    """Around an update that is to have the same bits on shards as on whole parameters."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if not is_any_sharded(weights) or not is_fused(optimizer) or weights[0].device.type != "cpu":
        return NOTHING
    from evenstep.training.sharded_fused_update import ShardedUpdates

    return ShardedUpdates()  # type: ignore[no-untyped-call]
