"""Activation checkpointing: a block keeps its inputs, and computes what it did once more in backward.

The blocks are the units that a sharded model gathers (`evenstep.strategies.base.units`), so that of a sharded model one
block is gathered, computed again and dropped at a time.

torch's non-reentrant checkpoint restores random generators and autocast. It does not restore buffers: BatchNorm would
count every batch twice, and a spectral norm would iterate once more and compute with other weights. Here buffers that
forward changes are as they were before it while it runs again, and then as they were after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenstep.errors import TaskError
from evenstep.strategies.base import same_numbers, units


def checkpoint_activations(model: nn.Module) -> None:
    """Let every block of the model compute its activations again in backward, instead of keeping them."""
    blocks = units(model)
    if not blocks:
        raise TaskError(
            "--checkpoint-activations found no blocks in the model: they are the children of an nn.ModuleList or an "
            "nn.Sequential, with parameters that no other part shares.\nKeep the model's layers in one of these, or "
            "call torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) in its forward, without the flag"
        )
    for block in blocks:
        block.forward = RecomputedForward(block)


class RecomputedForward:
    """Takes the place of a block's forward. A deep copy of the block has one of its own."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._forward = block.forward
        self._changing: list[str] | None = None
        """Buffers that forward changes in training; None before the first one."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*arguments, **named)
        # Not passed on as they are: checkpoint has keywords of its own.
        forward = partial(self._forward, **named) if named else self._forward
        before = self._taken() if self._block.training else {}
        if not before:
            return checkpoint(forward, *arguments, use_reentrant=False)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self._rewound(before)

        result = checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts)
        if self._changing is None:
            self._changing = [name for name, value in self._buffers().items() if not _is_same(before[name], value)]
            # Taken again in backward: what did not change is not kept.
            for name in set(before) - set(self._changing):
                del before[name]
        return result

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._block.named_buffers())

    def _taken(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers that forward changes, so far as that is known."""
        if self._changing is not None and not self._changing:
            return {}
        found = self._buffers()
        return {name: found[name].detach().clone() for name in (found if self._changing is None else self._changing)}

    @contextmanager
    def _rewound(self, before: dict[str, torch.Tensor]) -> Iterator[None]:
        after = {name: value.detach().clone() for name, value in self._buffers().items() if name in before}
        self._put(before)
        try:
            yield
        finally:
            self._put(after)

    @torch.no_grad()
    def _put(self, values: dict[str, torch.Tensor]) -> None:
        buffers = self._buffers()
        for name, value in values.items():
            buffers[name].copy_(value)


def _is_same(before: torch.Tensor, after: torch.Tensor) -> bool:
    """False also of tensors without values, as a forecast of memory has them."""
    return type(after) is torch.Tensor and before.shape == after.shape and same_numbers(before, after)
