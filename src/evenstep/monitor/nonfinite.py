"""A loss that is NaN or infinite: whose samples made it, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evenstep.distributed.world import World
from evenstep.plan import PrecisionName
from evenstep.strategies.base import DistributedModel

BAD_DATA = "whose own data is NaN or infinite"
"""In a report of a micro-batch, after its samples."""


@dataclass(frozen=True)
class NonFiniteMean:
    """The mean loss of a step, NaN or infinite."""

    mean: float
    step: int
    epoch: int
    precision: PrecisionName
    spoilt: list[str]
    """This rank's micro-batches that made it so, in words."""


def explain(world: World, model: DistributedModel, loss: NonFiniteMean) -> str:
    """Which rank's samples made the loss of a step non-finite; all ranks call this together."""
    spoilt = [reports for reports in world.gather(loss.spoilt) if reports]
    # Of all micro-batches, one whose data is the cause says most.
    every = sorted((one for reports in spoilt for one in reports), key=lambda one: BAD_DATA not in one)
    where = f"; {every[0]}" if every else "; every part is finite, their sum is not"
    others = f", and {_counted(len(spoilt) - 1, 'other rank')} too" if len(spoilt) > 1 else ""
    names = [name for name, weight in model.module.named_parameters() if not is_finite(weight)]
    if any(world.gather(bool(names))):
        known = f"{names[0]} is" if names else "Some weights are"
        why = "in an earlier step a gradient was not finite, although the loss was"
        advice = f"{known} not finite: {why}. Try --clip 1.0."
    elif every and BAD_DATA in every[0]:
        advice = "The weights were not changed by this step. Correct these samples, or leave them out."
    else:
        advice = "The weights were not changed by this step. A lower learning rate or --clip 1.0 often helps."
    hint = " fp16 holds no number above 65504; try bf16." if loss.precision == "fp16" else ""
    return f"the loss is {loss.mean} at step {loss.step} (epoch {loss.epoch + 1}){where}{others}.\n{advice}{hint}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def is_finite(weight: torch.Tensor) -> bool:
    """Whether this rank's part of a weight holds neither NaN nor infinity."""
    local = getattr(weight, "to_local", lambda: weight)()
    if local.is_meta:
        # On another stage of a pipeline.
        return True
    # A sum reads each number once, and writes none; that of large numbers may be infinite though none of them is.
    return bool(torch.isfinite(local.sum())) or bool(torch.isfinite(local).all())
