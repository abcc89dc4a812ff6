"""Batches and samples are nested tuples, lists and dicts: map a function over their tensors, or list their leaves.

Unlike `torch.utils._pytree`, these functions also descend into mappings that are not a dict, such as the
`BatchEncoding` of a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


def map_tensors(data: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`data` with `function` applied to every tensor at any depth; other leaves are kept."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        values = {name: map_tensors(value, function) for name, value in data.items()}
        return values if type(data) is dict else _mapping_like(data, values)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, function) for value in data))
    if isinstance(data, tuple | list):
        return type(data)(map_tensors(value, function) for value in data)
    return data


def map_fields(data: Any, function: Callable[[Any], Any]) -> Any:
    """`data` with `function` applied to each of its fields, one level deep; `function(data)` if it has none."""
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(function(value) for value in data))
    if isinstance(data, tuple | list):  # before Mapping, whose isinstance check is slow
        return tuple([function(value) for value in data])
    if isinstance(data, Mapping):
        return {name: function(value) for name, value in data.items()}
    return function(data)


def concatenated(parts: Sequence[Any]) -> Any:
    """Nested tensors of several parts of a batch, one after the other along the first dimension."""
    first = parts[0]
    if len(parts) == 1 or (isinstance(first, torch.Tensor) and not first.ndim):
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([part.to(first.device) for part in parts])
    if isinstance(first, Mapping):
        return _mapping_like(first, {name: concatenated([part[name] for part in parts]) for name in first})
    if isinstance(first, list) and not any(isinstance(leaf, torch.Tensor) for leaf in leaves(first)):
        return [value for part in parts for value in part]
    if isinstance(first, tuple | list):
        fields = [concatenated(values) for values in zip(*parts, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    return first


def leaves(data: Any) -> Iterator[Any]:
    """Everything in `data` that is not a tuple, list or mapping, depth first."""
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list | tuple):
        for value in data:
            yield from leaves(value)
    else:
        yield data


def _mapping_like(data: Any, values: dict[Any, Any]) -> Any:
    """The values in the user's own mapping class; in a plain dict if that class cannot be built from one."""
    try:
        return type(data)(values)
    except Exception:
        return values
