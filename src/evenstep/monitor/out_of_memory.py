"""After a CUDA out-of-memory error: try smaller micro-batches to find the largest one that fits."""

from __future__ import annotations

import gc
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
from evenstep.monitor.known_errors import Situation, is_out_of_memory
from evenstep.plan import IN_THIS_PROCESS, Plan
from evenstep.private_apis import BatchNorm
from evenstep.strategy_facts import sharding
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


def largest_that_fits(try_micro: Callable[[int], None], micro: int) -> int | None:
    """The first of micro//2, micro//4 ... 1 samples at once with which `try_micro` has enough memory; None if none.

    Call it outside the `except` block of the failure: a traceback keeps the tensors of its frames alive.
    """
    while micro > 1:
        micro //= 2
        _empty_caches()
        if _has_room(try_micro, micro):
            return micro
    return None


def _has_room(try_micro: Callable[[int], None], micro: int) -> bool:
    try:
        try_micro(micro)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _empty_caches() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fewer_samples(situation: Situation) -> str:
    """The advice after it: the micro-batch that fits, as --accumulate."""
    if situation.fits and situation.share:
        now = -(-situation.share // situation.accumulate)
        needed = -(-situation.share // situation.fits)
        same = "the result stays the same" + (
            ", but for BatchNorm, which sees fewer samples at once" if situation.has_batchnorm else ""
        )
        return (
            f"It fits with --accumulate {needed} ({-(-situation.share // needed)} samples at once instead of {now}; "
            f"tried): {same}"
        )
    if situation.was_tried:
        return (
            f"Not even one sample at once fits (tried): try --precision bf16, --strategy {sharding()} over more "
            "devices, or --checkpoint-activations"
        )
    return (
        f"Try --accumulate {2 * situation.accumulate}: half as many samples at once, and the same result. Or "
        f"--precision bf16, or --strategy {sharding()}"
    )
