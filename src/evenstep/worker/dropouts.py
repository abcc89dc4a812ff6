"""Dropout, switched off in this whole process: it is drawn anew for every device, and nothing else should be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_DROPS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


class DropoutOff:
    """What makes `F.dropout`, `nn.Dropout` and attention leave everything in; `was_used` tells whether any was on.

    Functions are replaced rather than a torch mode entered: modes are per thread, and dp computes in threads; nor
    would a mode be there when an activation checkpoint computes forward again.
    """

    def __init__(self) -> None:
        self.was_used = False
        for name in [*_DROPS, *(f"{name}_" for name in _DROPS)]:
            calm = self._calm(getattr(torch, name))
            setattr(torch._VF, name, calm)
            setattr(torch, name, calm)
        attention = F.scaled_dot_product_attention
        _replace_everywhere(attention, self._calm_attention(attention))

    def in_layers(self, model: nn.Module) -> nn.Module:
        """Recurrent layers hand their dropout to a kernel that has it inside."""
        for layer in model.modules():
            if isinstance(layer, nn.RNNBase) and layer.dropout:
                self.was_used = True
                layer.dropout = 0.0
        return model

    def _calm(self, drop: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def calm(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
            self.was_used = self.was_used or bool(train and p)
            return drop(input, p, False)

        return calm

    def _calm_attention(self, attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def calm(*given: Any, **named: Any) -> torch.Tensor:
            # query, key, value, mask, dropout, ...
            chance = named.pop("dropout_p", given[4] if len(given) > 4 else 0.0)
            self.was_used = self.was_used or bool(chance)
            return attention(*given[:4], *((0.0,) if len(given) > 4 else ()), *given[5:], **named)

        return calm


def _replace_everywhere(old: object, new: object) -> None:
    """In every module that has imported it, under whatever name."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)
