"""The gradients of a model, averaged after backward, where processes share memory.

Not by DDP, whose buckets copy every gradient once more and hide what is sent behind the rest of backward: here is
nothing to hide it behind, for who adds up is the core that computes.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.profiler import record_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from evenstep.errors import TaskError, TrainingError
from evenstep.worker.comm.channel import DTYPES, Channel
from evenstep.worker.fused import has_sparse_gradients
from evenstep.worker.gradients import fills_memory
from evenstep.worker.tap import Tap


class Averaging:
    """Goes around the last backward of a step; an open tap is told of it, and for a muted one nothing is sent."""

    def __init__(self, channel: Channel, model: nn.Module, tap: Tap) -> None:
        self._channel, self._tap = channel, tap
        self._is_broken = False
        self._names, self._weights = zip(*trained(model), strict=True)
        self._is_plain = [weight.is_contiguous() for weight in self._weights]
        self._dtypes = [weight.dtype for weight in self._weights]
        self._kinds = [[i for i, one in enumerate(self._dtypes) if one == kind] for kind in dict.fromkeys(self._dtypes)]
        """The places of weights, by type: a channel averages those of one type at a time."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        if error is not None or self._tap.is_muted:
            return
        if torch.autograd.profiler._is_profiler_enabled:
            # As dp's own sending is called in a trace; an engine of torch's would be in it by itself.
            with record_function("evenstep: reduce"):
                self._average()
        else:
            self._average()

    def _average(self) -> None:
        rows = [
            gradient
            if is_plain and gradient is not None and gradient.dtype is dtype and gradient.is_contiguous()
            else self._as_row(place)
            for place, (gradient, is_plain, dtype) in enumerate(
                zip([weight.grad for weight in self._weights], self._is_plain, self._dtypes, strict=True)
            )
        ]
        tap = self._tap
        begin = tap.now() if tap.is_open else None
        tap.mark("communication")
        if self._is_broken:
            raise TrainingError("an average of gradients was interrupted, and cannot be gone on from: start anew")
        self._is_broken = True
        for places in self._kinds:
            self._channel.average([rows[place] for place in places])
        self._is_broken = False
        if begin is not None:
            tap.sent(rows)
            tap.travelled("gradients", begin)

    def _as_row(self, place: int) -> torch.Tensor:
        """A gradient that does not lie in memory in the order in which its numbers are counted; its weight may not."""
        weight: nn.Parameter = self._weights[place]
        if weight.grad is None:
            raise no_gradient([name for name, one in zip(self._names, self._weights, strict=True) if one.grad is None])
        if weight.grad.dtype is not weight.dtype:
            raise TaskError(
                f"the gradient of {self._names[place]} is {weight.grad.dtype} and its weight {weight.dtype}; ddp "
                "averages gradients of their weights' type: leave grad_dtype as it is"
            )
        if weight.grad.stride() != weight.stride():
            weight.grad = torch.empty_like(weight).copy_(weight.grad)
        return weight.grad.as_strided((weight.numel(),), (1,))


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that get gradients, and their names."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def can_average(model: nn.Module) -> bool:
    """Whether a channel takes all of its gradients."""
    return not has_sparse_gradients(model) and all(_fits(weight) for _, weight in trained(model))


def _fits(weight: nn.Parameter) -> bool:
    """Whether it is numbers that fill their memory without gaps, in whatever order; its gradients use the same one."""
    if is_lazy(weight) or is_traceable_wrapper_subclass(weight) or weight.dtype not in DTYPES:
        return False
    return weight.numel() == 0 or fills_memory(weight)


def no_gradient(names: list[str]) -> TaskError:
    """A step would go wrong: some rank's parameters have no gradient to average."""
    return TaskError(
        f"no gradient reaches {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}, and ddp averages one "
        "of every parameter.\nUse them in the loss, or switch them off: parameter.requires_grad_(False)"
    )
