"""What numbers a training computes with, chosen once; and fp16's loss scale."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from evenstep.checkpoint.shards import is_sharded
from evenstep.plan import PrecisionName
from evenstep.private_apis import infinity_flags
from evenstep.strategies.base import NOTHING

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """fp64 and fp32 compute in the type of the weights; bf16 and fp16 in torch's autocast, over float32 weights."""

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.name = name
        self.half = _HALF.get(name)
        self.dtype = torch.float64 if name == "fp64" else torch.float32
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        if device.type == "cuda":
            # torch lets convolutions use tf32 by default: fp32 here means fp32.
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            torch.backends.cudnn.allow_tf32 = name == "tf32"

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context in which the loss is computed; per thread, so every replica enters its own."""
        if self.half is None:
            return NOTHING
        return torch.autocast(device.type, dtype=self.half)

    def fit(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model in the type of this precision's weights."""
        return model.double() if self.name == "fp64" else model

    def fit_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input in the type of the weights; fp64 alone changes it."""
        return tensor.double() if self.name == "fp64" and tensor.is_floating_point() else tensor


def unscale(optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Divide gradients by the loss scale, and note on all ranks whether one is not finite."""
    scaler.unscale_(optimizer)
    _share_infinities(optimizer, scaler)


def update_scale(scaler: torch.amp.GradScaler) -> bool:
    """After an update: grow the loss scale, or reduce it if a gradient was not finite; whether the update was taken."""
    before = scaler.get_scale()
    scaler.update()
    return scaler.get_scale() >= before


def _share_infinities(optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Let all ranks skip a step if a shard of one is not finite.

    torch shares what each found, unless the first parameter is one that all ranks hold whole.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    scalar = next((weight for weight in weights if is_sharded(weight) and not weight.ndim), None)
    if scalar is not None and is_sharded(scalar):
        for flag in infinity_flags(scaler, optimizer):
            for dim in range(scalar.device_mesh.ndim):
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=scalar.device_mesh.get_group(dim))
