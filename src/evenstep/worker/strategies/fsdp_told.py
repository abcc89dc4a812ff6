"""fsdp's two collectives, told of to a tap; muted, each rank gathers its own slice as often as there are ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from evenstep.worker.tap import Tap, size_of


class _Told:
    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ToldAllGather(_Told, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._tap.is_muted:
            # Numbers that are there, of the right size: what was never written may be NaN.
            output_tensor.view(dist.get_world_size(group), -1).copy_(input_tensor.reshape(1, -1))
            return None
        with self._tap.sending("all-gather", size_of([input_tensor])):
            work: dist.Work | None = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        return work


class ToldReduceScatter(_Told, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._tap.is_muted:
            output_tensor.copy_(input_tensor.view(dist.get_world_size(group), -1)[dist.get_rank(group)])
            return None
        with self._tap.sending("reduce-scatter", size_of([input_tensor])):
            work: dist.Work | None = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        return work
