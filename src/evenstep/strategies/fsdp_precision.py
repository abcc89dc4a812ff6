"""fsdp's own mixed precision: shards, gradients that are reduced, and the optimizer in float32; gathers in bfloat16.

A gather sends half of the bytes, the gathered unit takes half of the memory, and forward casts no weights. Autocast
stays on: it decides for each operation what it computes in, as under any other strategy, so that a task sees the types
that it sees on one device, and its loss is float32. What differs from one device is that a normalization's weights, and
embeddings, are rounded to bfloat16 too.

Autocast knows no rule for some layers, which want inputs and parameters of one type; their inputs are cast
(`cast_inputs`). BatchNorm, RNNs and parametrized layers (spectral norm) cannot compute with bfloat16 parameters beside
float32 buffers or states: units with such layers are gathered in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from evenstep.private_apis import NormBase

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
AUTOCAST_KINDS = (nn.Linear, *CONVOLUTIONS, nn.Embedding)
"""Layers whose operations autocast casts, or that take no floating-point inputs."""
WHOLE_KINDS = (NormBase, nn.RNNBase, nn.RNNCellBase, nn.EmbeddingBag, ParametrizationList)
"""Layers whose parameters stay in float32."""


def policy(unit: nn.Module, dtype: torch.dtype | None) -> dict[str, Any]:
    """Arguments of `fully_shard` for a unit whose parameters are gathered in `dtype`; none for those that keep theirs.

    Call it with the units first, and then with the rest of the model.
    """
    if dtype is None or not can_be_gathered_in_half(unit):
        return {}
    from torch.distributed.fsdp import MixedPrecisionPolicy

    cast_inputs(unit, dtype)
    # Inputs of a unit are not cast: those of the root are the batch, and targets may be among them.
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)}


def can_be_gathered_in_half(unit: nn.Module) -> bool:
    """Whether all parameters of a unit that are not sharded yet are float32, and no layer needs them so."""
    return all(map(_computes_in_half, (layer for layer in unit.modules() if _own_parameters(layer))))


def _computes_in_half(layer: nn.Module) -> bool:
    has_statistics = any(buffer.is_floating_point() for buffer in layer.buffers(recurse=False))
    is_float32 = all(weight.dtype is torch.float32 for weight in _own_parameters(layer))
    return is_float32 and not has_statistics and not isinstance(layer, WHOLE_KINDS)


def cast_inputs(unit: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point inputs of those layers that autocast does not look after."""
    for layer in unit.modules():
        is_leaf = next(layer.children(), None) is None
        if is_leaf and _own_parameters(layer) and not isinstance(layer, AUTOCAST_KINDS):
            layer.register_forward_pre_hook(Cast(dtype), with_kwargs=True)


class Cast:
    """A forward pre-hook."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, layer: nn.Module, arguments: Any, named: Any) -> Any:
        return tuple(map(self._cast, arguments)), {name: self._cast(value) for name, value in named.items()}

    def _cast(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _own_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Those that no unit inside has taken."""
    from torch.distributed.tensor import DTensor

    return [weight for weight in layer.parameters(recurse=False) if not isinstance(weight, DTensor)]
