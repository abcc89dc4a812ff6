"""A gradient's life: made, used, forgotten; with none of the steps that torch takes around these in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

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


def separate(weights: Sequence[torch.Tensor]) -> None:
    """Give gradients that share memory a memory each.

    Backward of `a.view(...) + b.view(...)` hands both the same numbers, and torch keeps them as two gradients. Whatever
    changes gradients in place changes these twice: the next micro-batch, an average, clipping.
    """
    places = sorted(
        [
            (gradient.data_ptr(), gradient.nbytes, place)
            for place, weight in enumerate(weights)
            if type(gradient := weight.grad) is torch.Tensor and gradient.layout is torch.strided
        ]
    )
    end = 0
    for start, num_bytes, place in places:
        if start < end:
            gradient = weights[place].grad
            assert gradient is not None
            weights[place].grad = gradient.clone()
        end = max(end, start + num_bytes)


def fills_memory(weight: torch.Tensor) -> bool:
    """Whether its numbers lie together without gaps, in whatever order; its gradients then lie in the same one."""
    last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    return last + 1 == weight.numel()


def update(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, less the profiler's range and the compiler's marks around it: a twentieth of a small step.

    Whoever listens is told: with hooks, under a profiler, and for any step but torch's own, it is the whole call.
    """
    step: Any = getattr(optimizer, "__dict__", {}).get("step", type(optimizer).step)
    # Bound to the optimizer, or to another one; a scheduler wraps it, to know that there was a step.
    is_own = getattr(step, "__self__", optimizer) is optimizer
    bare = _bare_step(getattr(step, "__func__", step)) if is_own else None
    if bare is None or _is_listened_to(optimizer) or optimizer.defaults.get("differentiable"):
        optimizer.step()
        return
    if hasattr(step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]
    with torch.no_grad():
        bare(optimizer)


def _is_listened_to(optimizer: torch.optim.Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch.autograd.profiler._is_profiler_enabled
    )


@cache
def _bare_step(step: Any) -> Callable[[torch.optim.Optimizer], Any] | None:
    """A step of torch's own without what torch wraps around it; None if somebody else had a hand in it."""
    layers = [step]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    modules = [getattr(layer, "__globals__", {}).get("__name__", "") for layer in layers]
    return layers[-1] if all(name.startswith("torch.optim.") for name in modules) else None


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
