"""After a CUDA out-of-memory error: try smaller micro-batches to find the largest one that fits."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from evenstep.checkpoint.shards import is_sharded
from evenstep.data.nested import map_tensors
from evenstep.internals import BatchNorm
from evenstep.monitor.known_errors import Situation, largest_that_fits
from evenstep.plan import IN_THIS_PROCESS, Plan
from evenstep.task import Amount, Batch, Model


@dataclass(frozen=True)
class FailedStep:
    """What is needed to run the loss of a failed step again, on fewer samples."""

    module: nn.Module
    loss: Callable[[Model, Batch], Amount]
    read_inputs: Callable[[], Batch]
    """Reads a micro-batch of the size that did not fit."""
    autocast: Callable[[torch.device], AbstractContextManager[Any]]
    device: torch.device


def fit_command(plan: Plan) -> str:
    """The command that shows what would fit; none for a task that no command finds."""
    if plan.task == IN_THIS_PROCESS:
        return ""
    where = f"--strategy {plan.strategy} --devices {len(plan.devices)}"
    return f"evenstep fit {shlex.quote(plan.task_name)} {where} --batch {plan.batch}"


def diagnose(error: BaseException, step: FailedStep, share: int, accumulate: int) -> Situation:
    """The largest micro-batch that fits, found by trying; `share` counts the samples of a step on one device."""
    # The traceback keeps the tensors of the failed step alive.
    traceback.clear_frames(error.__traceback__)
    has_batchnorm = any(isinstance(layer, BatchNorm) for layer in step.module.modules())
    situation = Situation(share=share, accumulate=accumulate, has_batchnorm=has_batchnorm)
    weights = [weight for weight in step.module.parameters() if weight.requires_grad]
    # A sharded model runs only on all ranks together, and only this rank is here.
    if any(is_sharded(weight) for weight in weights) or step.device.type != "cuda":
        return situation
    for weight in weights:
        weight.grad = None
    try:
        fits = largest_that_fits(_trial(step, weights), -(-share // accumulate))
    except Exception:
        # Report the out-of-memory error, not one of the trial.
        return situation
    return replace(situation, fits=fits, was_tried=True)


def _trial(step: FailedStep, weights: list[nn.Parameter]) -> Callable[[int], None]:
    """A function that computes the gradients of the first `num_samples` samples."""
    inputs: list[Any] = []

    def try_micro_batch(num_samples: int) -> None:
        if not inputs:
            inputs.append(step.read_inputs())
        fewer: Any = map_tensors(inputs[0], lambda tensor: tensor[:num_samples].to(step.device))
        with step.autocast(step.device):
            loss = step.loss(step.module, fewer)
        # Not backward(): its hooks would start collectives, and the other ranks are not in this step.
        torch.autograd.grad(loss[0] if isinstance(loss, tuple | list) else loss, weights, allow_unused=True)
        torch.cuda.synchronize(step.device)

    return try_micro_batch
