"""The blocks of a model: what fsdp shards and gathers at a time, and activation checkpointing computes again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn


def units(model: nn.Module) -> list[nn.Module]:
    """The parts that are gathered one at a time: the outermost children of ModuleList and Sequential.

    A parameter shared between two parts stays with the root: as part of one unit it would be missing in the other.
    """
    shared = _shared_parameters(model)
    return [unit for unit in _candidates(model) if not any(id(weight) in shared for weight in unit.parameters())]


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if _is_container(module) and not _is_container(child) and next(child.parameters(), None) is not None:
            yield child
        else:
            yield from _candidates(child)


def _is_container(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.Sequential)


def _shared_parameters(model: nn.Module) -> set[int]:
    uses = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    return {key for key, count in uses.items() if count > 1}
