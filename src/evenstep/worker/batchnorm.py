"""BatchNorm with the statistics of the whole global batch, on any device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def synchronised(module: nn.Module) -> nn.Module:
    """The model with every BatchNorm made to share its statistics among processes; names and weights stay."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
            # The class alone is changed: parameters, buffers and their names are those of the user's layer.
            child.__class__ = SharedBatchNorm
    return module


class SharedBatchNorm(_BatchNorm):
    """torch's SyncBatchNorm runs on CUDA alone; this is the same arithmetic with a differentiable all-reduce."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        from torch.distributed.nn.functional import all_reduce

        self._check_input_dim(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.double() if input.dtype == torch.float64 else input.float()
        count = input.numel() / input.size(1)
        sums = torch.cat([wide.sum(dims), wide.new_full((1,), count)])
        sums = all_reduce(sums)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        shape = [1, -1] + [1] * (input.dim() - 2)
        centred = wide - mean.view(shape)
        variance = all_reduce((centred * centred).sum(dims)) / total
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
