"""Which parts of a model fsdp gathers on their own: those that keep their parameters to themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from evenstep.errors import TaskError
from evenstep.worker.copies import SMALL_ENOUGH, copied, same_numbers
from evenstep.worker.strategies.single import Sample
from evenstep.worker.world import World


def units(model: nn.Module) -> list[nn.Module]:
    """The parts that are gathered one at a time: the outermost children of ModuleList and Sequential.

    A parameter shared between two parts stays with the root: as part of one unit it would be missing in the other.
    """
    shared = _shared_parameters(model)
    return [unit for unit in _candidates(model) if not any(id(weight) in shared for weight in unit.parameters())]


def units_apart(model: nn.Module, world: World, sample: Sample | None) -> list[nn.Module]:
    """Those units whose parameters nobody uses but themselves, as far as a sample shows; all ranks call this.

    Outside of its own forward, a unit has this rank's slices of its parameters. An average of weights that the model
    keeps in a buffer, a penalty on all weights, a method other than forward: these need the parameters whole. The
    units of a large model are taken as they are.
    """
    found = units(model)
    if sample is None or sum(weight.numel() for weight in model.parameters()) > SMALL_ENOUGH:
        return found
    used, written = zip(*world.gather(_observed(model, sample)), strict=True)
    changed = next(filter(None, written), None)
    if changed:
        raise TaskError(
            f"forward changes the parameter {changed[0]}; under fsdp it has a gathered copy, which is dropped "
            "afterwards.\nKeep what forward changes in a buffer (register_buffer), or use ddp"
        )
    return [unit for index, unit in enumerate(found) if not any(index in of_rank for of_rank in used)]


def _observed(model: nn.Module, sample: Sample) -> tuple[list[int], list[str]]:
    """The units that were used from outside in a sample, and the parameters that it changed."""
    copy = copied(model)
    watched = UsesOutside(units(copy))
    with watched:
        sample(copy)
    pairs = zip(model.named_parameters(), copy.parameters(), strict=True)
    return sorted(watched.seen), [name for (name, before), after in pairs if not same_numbers(before, after)]


class UsesOutside(TorchFunctionMode):
    """Inside, notes which units' parameters are computed with while the unit itself is not running."""

    def __init__(self, watched: Sequence[nn.Module]) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self._running: Counter[int] = Counter()
        self._unit_of = {id(weight): index for index, unit in enumerate(watched) for weight in unit.parameters()}
        for index, unit in enumerate(watched):
            unit.register_forward_pre_hook(lambda *_, index=index: self._running.update([index]))
            unit.register_forward_hook(lambda *_, index=index: self._running.subtract([index]), always_call=True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        used = {self._unit_of[id(one)] for one in tree_leaves((args, kwargs)) if id(one) in self._unit_of}
        outside = {index for index in used if not self._running[index]}
        # A shape or a device is the same for a slice.
        if outside and any(isinstance(one, torch.Tensor) for one in tree_leaves(result)):
            self.seen |= outside
        return result


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
