"""The two ends of a gradient's life, with none of the steps that torch takes around them in Python."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

_ENGINE = torch.autograd.Variable._execution_engine


def go_back(loss: torch.Tensor, weight: float) -> None:
    """`(loss * weight).backward()`: the weight is where the engine starts, and no operation of the graph.

    `Tensor.backward` makes a tensor of ones at every call and looks at it from all sides: a tenth of a small step.
    """
    if type(loss) is not torch.Tensor:
        (loss * weight).backward()
        return
    start = _start(weight, loss.dtype, loss.device)
    _ENGINE.run_backward((loss,), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# Never dropped: a recorded step reads it for as long as it is replayed.
@cache
def _start(weight: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), weight, dtype=dtype, device=device)


def forget(weights: Iterable[torch.Tensor]) -> None:
    """Drop their gradients."""
    for weight in weights:
        weight.grad = None


def forget_gradients(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.zero_grad()`, less the profiler's range around it; a zero_grad of the user's own is called."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        forget(group["params"])
