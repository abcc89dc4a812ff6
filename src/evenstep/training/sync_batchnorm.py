"""BatchNorm with the statistics of the whole global batch, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evenstep.private_apis import BatchNorm


def synchronised(module: nn.Module) -> nn.Module:
    """The model with every BatchNorm made to share its statistics among processes; names and weights stay."""
    for child in module.modules():
        if isinstance(child, BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
            # The class alone is changed: parameters, buffers and their names are those of the user's layer.
            child.__class__ = SharedBatchNorm
    return module


def is_local(module: nn.Module) -> bool:
    """Whether a model has a BatchNorm that knows its own process's share of a batch alone."""
    shared = (nn.SyncBatchNorm, SharedBatchNorm)
    return any(isinstance(one, BatchNorm) and not isinstance(one, shared) for one in module.modules())


_stands_in = False


@contextmanager
def standing_in() -> Iterator[None]:
    """Around forward and backward of a sample that stands in for none: in collectives it takes part, and no more."""
    global _stands_in
    _stands_in = True
    try:
        yield
    finally:
        _stands_in = False


class Sum(torch.autograd.Function):
    """The sum over all processes; what comes back to it in backward is summed too."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradients: torch.Tensor) -> torch.Tensor:
        total = gradients.clone()
        dist.all_reduce(total)
        return total


def summed(values: torch.Tensor) -> torch.Tensor:
    """The sum over all processes; of a sample that stands in for none, whatever it holds, zeros are added."""
    if _stands_in:
        # The other ranks sum up in backward too, where their values need gradients.
        values = torch.zeros_like(values, requires_grad=values.requires_grad)
    total: torch.Tensor = Sum.apply(values)  # type: ignore[no-untyped-call]
    return total


class SharedBatchNorm(BatchNorm):
    """torch's SyncBatchNorm runs on CUDA alone; this is the same arithmetic with a differentiable all-reduce."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.double() if input.dtype == torch.float64 else input.float()
        count = input.numel() / input.size(1)
        sums = torch.cat([wide.sum(dims), wide.new_full((1,), count)])
        sums = summed(sums)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        shape = [1, -1] + [1] * (input.dim() - 2)
        centred = wide - mean.view(shape)
        variance = summed((centred * centred).sum(dims)) / total
        self._remember(mean.detach(), variance.detach() * total / (total - 1).clamp(min=1))
        normed = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normed = normed * self.weight.view(shape) + self.bias.view(shape)
        result: torch.Tensor = normed.to(input.dtype)
        return result

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(variance.to(self.running_var.dtype), rate)
