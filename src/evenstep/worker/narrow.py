"""Code that computes in fewer digits than it was asked to: `logits.float()` in a training in float64."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from evenstep.worker.draws_seen import innermost


class NarrowSeen(TorchFunctionMode):
    """While it is entered, notes the first line at which a float64 becomes a narrower float.

    A mode of functions: one of dispatch would see the same, and import sympy for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place: str | None = None

    def look_at(self, model: nn.Module) -> None:
        """Note a complex parameter, which stays as it is: `Module.double` changes real ones alone."""
        kept = (name for name, weight in model.named_parameters() if weight.dtype is torch.complex64)
        self.place = next((f"the parameter {name} is complex64" for name in kept), self.place)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.place is None and any(map(_is_narrow, _tensors(result))) and any(map(_is_wide, _tensors(args))):
            self.place = innermost(traceback.extract_stack()) or str(func)
        return result


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 8


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float64


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
