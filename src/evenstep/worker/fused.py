"""Updates in one kernel, where torch has one and the user has not chosen otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evenstep.worker.state import is_sharded

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_CHOICES = ("foreach", "fused", "differentiable", "capturable")
"""What a user may have set, and what then stays as it is."""


def fuse(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Have the optimizer update all weights at once: the same arithmetic but for rounding, in a third of the time."""
    if type(optimizer) not in FUSED or has_sparse_gradients(model):
        return
    groups = [optimizer.defaults, *optimizer.param_groups]
    if any(group.get(choice) for group in groups for choice in _CHOICES):
        return
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    # torch has no rule for what a fused SGD does with sharded weights.
    if not all(map(_fits, weights)) or (type(optimizer) is torch.optim.SGD and any(map(is_sharded, weights))):
        return
    if any(group.get("dampening") for group in groups):
        # A momentum that starts later (see `start_momentum`) is dampened once too often.
        return
    for group in groups:
        group["fused"] = True
    untyped: Any = optimizer
    # What the constructor sets with fused=True: fp16's scaler leaves the check for infinities to the kernel.
    untyped._step_supports_amp_scaling = True
    untyped._need_device_dtype_check_for_fused = True


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Before an update: parameters that get their first gradient after others did start from a momentum of zero.

    torch's fused SGD takes a momentum of every parameter or of none, and fails where an expert was idle so far.
    """
    if type(optimizer) is not torch.optim.SGD or not optimizer.state:
        return
    if len(optimizer.state) == sum([len(group["params"]) for group in optimizer.param_groups]):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"]:
            for weight in group["params"]:
                if weight.grad is not None and optimizer.state[weight].get("momentum_buffer") is None:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its kernel can be told, by a number on the card, to leave the weights as they are."""
    return type(optimizer) in FUSED and all(group.get("fused") for group in optimizer.param_groups)


def _fits(weight: torch.Tensor) -> bool:
    return weight.is_floating_point() and weight.device.type in ("cpu", "cuda")


def has_sparse_gradients(model: nn.Module) -> bool:
    """Whether a layer was told to make them."""
    return any(getattr(layer, "sparse", False) is True for layer in model.modules())
