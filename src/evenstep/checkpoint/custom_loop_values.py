"""What a custom loop adds to a checkpoint: values for its JSON part, and their tensors for a file of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evenstep.checkpoint.shards import gathered, is_sharded

_TENSOR = "(tensor)"


def without_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Nested dicts and lists in which each tensor has moved to `tensors`, and its name there stands for it.

    All ranks call this: a sharded tensor becomes whole.
    """
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        value = gathered(value) if is_sharded(value) else value
        # A copy: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {key: without_tensors(one, tensors) for key, one in value.items()}
    return [without_tensors(one, tensors) for one in value] if isinstance(value, list | tuple) else value


def with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `without_tensors` was given, with tensors on the CPU and tuples as lists."""
    if isinstance(value, Mapping):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: with_tensors(one, tensors) for key, one in value.items()}
    return [with_tensors(one, tensors) for one in value] if isinstance(value, list) else value
