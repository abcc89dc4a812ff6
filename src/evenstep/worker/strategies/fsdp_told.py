"""fsdp's two collectives, told of to a tap; muted, each rank gathers its own slice as often as there are ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from evenstep.worker.tap import Tap, size_of


class ToldAllGather(DefaultAllGather):
    def __init__(self, tap: Tap, before: Callable[[], None]) -> None:
        self._tap, self._before = tap, before

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
        if self._tap.is_muted:
            # Numbers that are there, of the right size: what was never written may be NaN.
            own = input_tensor.flatten().clone()
            output_tensor.view(-1, own.numel()).copy_(own)
            return None
        self._before()
        with self._tap.sending("all-gather", size_of([input_tensor])):
            return super().__call__(output_tensor, input_tensor, *more, **named)


class ToldReduceScatter(DefaultReduceScatter):
    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
        if self._tap.is_muted:
            output_tensor.copy_(input_tensor.view(-1, output_tensor.numel())[dist.get_rank()].view_as(output_tensor))
            return None
        with self._tap.sending("reduce-scatter", size_of([input_tensor])):
            return super().__call__(output_tensor, input_tensor, *more, **named)
