"""How many samples at once would have fitted into a card's memory, found by trying."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.checkpoint.state import is_sharded
from evenstep.data.dataset import to_device
from evenstep.monitor.known_errors import Situation, largest_that_fits
from evenstep.plan import Plan
from evenstep.task import Task
from evenstep.training.run import Run


def room(error: BaseException, run: Run, task: Task, plan: Plan) -> Situation:
    """What to answer someone whose step did not fit; the failed step's tensors are dropped first."""
    traceback.clear_frames(error.__traceback__)
    (model,) = run.models.values()
    module = model.module
    share = -(-plan.batch // run.team.world.num_replicas)
    has_batchnorm = any(isinstance(one, _BatchNorm) for one in module.modules())
    situation = Situation(share=share, accumulate=plan.accumulate, has_batchnorm=has_batchnorm)
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    # A part of a sharded model cannot be run without the others, and these wait elsewhere.
    if any(is_sharded(weight) for weight in weights) or run.team.world.device.type != "cuda":
        return situation
    for weight in weights:
        weight.grad = None
    device = run.team.world.device
    batches: list[Any] = []

    def try_micro(num: int) -> None:
        if not batches:
            batches.append(next(iter(run.loader)).micro_batches[0][0].inputs)
        fewer: Any = to_device(batches[0], lambda tensor: tensor[:num].to(device))
        with run.team.precision.autocast(device):
            loss = task.loss(module, fewer)
        # Not backward(): that would wake up the engines that wait for other ranks.
        torch.autograd.grad(loss[0] if isinstance(loss, tuple | list) else loss, weights, allow_unused=True)
        torch.cuda.synchronize(device)

    try:
        fits = largest_that_fits(try_micro, -(-share // plan.accumulate))
    except Exception:
        # The failure that is to be explained must not be replaced by one of the explanation's own.
        return situation
    return Situation(share, plan.accumulate, fits, was_tried=True, has_batchnorm=has_batchnorm)
