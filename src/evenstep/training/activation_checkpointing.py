"""Activation checkpointing: a block keeps its inputs, and computes what it did once more in backward.

The blocks are the units that a sharded model gathers (`evenstep.strategies.base.units`), so that of a sharded model one
block is gathered, computed again and dropped at a time.

torch's non-reentrant checkpoint restores random generators and autocast. It does not restore buffers: BatchNorm would
count every batch twice, and a spectral norm would iterate once more and compute with other weights. Here buffers that
forward changes are as they were before it while it runs again, and then as they were after it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenstep.errors import TaskError
from evenstep.strategies.base import same_numbers
from evenstep.strategies.model_units import units


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
        self._changing: dict[tuple[bool, ...], set[str]] = {}
        """Buffers that forward changes, by which modules are in training mode; not known before the first one."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*arguments, **named)
        # Not passed on as they are: checkpoint has keywords of its own.
        forward = partial(self._forward, **named) if named else self._forward
        buffers = self.buffers()
        if not buffers:
            return checkpoint(forward, *arguments, use_reentrant=False)
        flags = tuple(module.training for module in self._block.modules())
        before = {name: buffers[name].detach().clone() for name in self._changing.get(flags, buffers)}
        versions = {name: _version(value) for name, value in buffers.items()}

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), Rewound(self, before)

        result = checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts)
        if flags not in self._changing:
            self._changing[flags] = {
                name for name, value in self.buffers().items() if not _is_same(before.get(name), value)
            }
            # Taken again in backward: what did not change is not kept.
            for name in set(before) - self._changing[flags]:
                del before[name]
        for name, value in self.buffers().items():
            # One that forward has registered is new.
            if name not in before and (value is not buffers.get(name) or _version(value) != versions[name]):
                # It changes for the first time, and what it was is not known; at least it does not change twice.
                before[name] = value.detach().clone()
                self._changing[flags].add(name)
        return result

    def buffers(self) -> dict[str, torch.Tensor]:
        """Of the block, by name."""
        return dict(self._block.named_buffers())

    @torch.no_grad()
    def put(self, values: dict[str, torch.Tensor]) -> None:
        """Give buffers these values."""
        buffers = self.buffers()
        for name, value in values.items():
            buffers[name].copy_(value)


class Rewound(AbstractContextManager[None]):
    """Inside, buffers are as they were before forward; entered by each backward through the block."""

    def __init__(self, forward: RecomputedForward, before: dict[str, torch.Tensor]) -> None:
        self._forward, self._before = forward, before
        self._after: dict[str, torch.Tensor] = {}

    def __enter__(self) -> None:
        buffers = self._forward.buffers()
        self._after = {name: buffers[name].detach().clone() for name in self._before}
        self._forward.put(self._before)

    def __exit__(self, *error: object) -> None:
        self._forward.put(self._after)
        self._after = {}


def _version(buffer: torch.Tensor) -> int:
    """How often it was changed."""
    return -1 if buffer.is_inference() else buffer._version


def _is_same(before: torch.Tensor | None, after: torch.Tensor) -> bool:
    """False also of tensors without values, as a forecast of memory has them."""
    if before is None or type(after) is not torch.Tensor:
        return False
    return before.shape == after.shape and same_numbers(before, after)
