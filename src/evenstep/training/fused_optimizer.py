"""Fused kernels of torch's optimizers.

torch gives each block of a GPU 65,536 numbers of a tensor, so that a small network occupies few blocks. `Sliced` cuts
its tensors into more, with the same arithmetic for every number. A launch takes 30 tensors or more, so up to that
number slices cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.checkpoint.shards import is_sharded
from evenstep.distributed.parameter_slices import slice_of
from evenstep.private_apis import (
    TorchDispatchMode,
    foreach_add_,
    fused_adam_,
    fused_adamw_,
    is_profiling,
    make_fused,
    note_step_for_scheduler,
)
from evenstep.strategies.base import fills_memory, has_sparse_gradients

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_CHOICES = ("foreach", "fused", "differentiable", "capturable")
"""What a user may have set, and what then stays as it is."""


def fuse(optimizer: torch.optim.Optimizer, model: nn.Module, *, is_exact: bool = False) -> None:
    """Use the fused kernel: the same arithmetic up to rounding, in a third of the time.

    Where it `is_exact`, only if every strategy can.
    """
    if type(optimizer) not in FUSED or has_sparse_gradients(model) or getattr(optimizer, "keeps_kernel", False):
        return
    groups = [optimizer.defaults, *optimizer.param_groups]
    if any(group.get(choice) for group in groups for choice in _CHOICES):
        return
    weights = [
        weight
        for group in optimizer.param_groups
        for weight in group["params"]
        if slice_of(weight) is None or not weight.is_meta
    ]
    if not all(map(_fits, weights)):
        return
    # torch has no rule for what a fused SGD does with sharded weights.
    if type(optimizer) is torch.optim.SGD and (is_exact or any(map(is_sharded, weights))):
        return
    if is_exact and not _is_same_on_shards(weights):
        return
    if any(group.get("dampening") for group in groups):
        # A momentum that starts later (see `start_momentum`) is dampened once too often.
        return
    for group in groups:
        group["fused"] = True
    make_fused(optimizer)


def _is_same_on_shards(weights: Sequence[torch.Tensor]) -> bool:
    """Whether a fused update of slices can be given the bits of an update of the whole."""
    from evenstep.training.sharded_fused_update import vector_bytes

    return all(weight.device.type != "cpu" for weight in weights) or vector_bytes() is not None


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Before an update: parameters that get their first gradient after others did start from a momentum of zero.

    torch's fused SGD takes a momentum of every parameter or of none, and fails where an expert was idle so far.
    """
    if type(optimizer) is not torch.optim.SGD or not optimizer.state:
        return
    if len(optimizer.state) == sum([len(group["params"]) for group in optimizer.param_groups]):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"]:
            for weight in group["params"]:
                if weight.grad is not None and optimizer.state[weight].get("momentum_buffer") is None:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its kernel skips the update if a flag on the GPU is set."""
    return type(optimizer) in FUSED and all(group.get("fused") for group in optimizer.param_groups)


class FusedAdam:
    """The step of a fused Adam or AdamW with lists of tensors that are made once.

    torch makes them in every step, and groups them by device and type: a tenth of what the host does in a small one.
    """

    def __init__(self, device: torch.device, flag: torch.Tensor | None = None) -> None:
        self._flag = flag
        """On the device: a step does nothing where it is 1."""
        self._one, self._counted = torch.ones((), device=device), torch.ones((), device=device)
        self._state: Any = None
        self._sizes = 0, 0
        """Of the state and of the groups when the lists were made, or found not to be usable."""
        self._lists: list[AdamLists] = []

    def recheck(self) -> None:
        """The optimizer may have been changed between two steps."""
        self._state = None

    def step(self, optimizer: Optimizer) -> bool:
        """One step; False if torch has to take it itself.

        Without a flag, in loops of the user's own, what the lists hold is compared with the optimizer in every step.
        """
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or is_profiling():
            return False
        sizes = len(optimizer.state), len(optimizer.param_groups)
        is_known = self._state is optimizer.state and self._sizes == sizes
        if not is_known or (self._flag is None and self._lists and not self._hold(optimizer)):
            self._lists = _adam_lists(optimizer, self._counted)
            self._state, self._sizes = optimizer.state, sizes
        gradients = [[weight.grad for weight in lists.weights] for lists in self._lists]
        # `None in of_group` would compare tensors.
        if not self._lists or any(NoneType in map(type, of_group) for of_group in gradients):
            return False
        note_step_for_scheduler(optimizer, getattr(optimizer, "__dict__", {}).get("step", type(optimizer).step))
        with torch.no_grad():
            if self._flag is not None:
                torch.sub(self._one, self._flag, out=self._counted)
            for lists, group, of_group in zip(self._lists, optimizer.param_groups, gradients, strict=True):
                lists.update(group, of_group, self._flag)
        return True

    def _hold(self, optimizer: Optimizer) -> bool:
        """Whether the lists are still what the optimizer has."""
        held = [state for lists in self._lists for state in lists.states]
        if {*map(id, held)} != {*map(id, optimizer.state.values())}:
            return False
        groups = zip(self._lists, optimizer.param_groups, strict=True)
        return all(lists.are_of(group) for lists, group in groups)


@dataclass(slots=True)
class AdamLists:
    """What the kernel takes of one group of parameters, besides the gradients."""

    weights: list[torch.Tensor]
    states: list[dict[str, Any]]
    averages: list[torch.Tensor]
    squares: list[torch.Tensor]
    largest: list[torch.Tensor]
    """Of amsgrad; otherwise none."""
    steps: list[torch.Tensor]
    counted: list[torch.Tensor]
    """What is added to each of these, always the same tensor: adding a tensor itself would read it."""

    def are_of(self, group: Mapping[str, Any]) -> bool:
        """Whether the group has these weights and this state, and options that the kernel takes."""
        kept = [(STATE[0], self.averages), (STATE[1], self.squares), (STATE[2], self.steps)]
        if group["amsgrad"] or self.largest:
            kept.append((LARGEST, self.largest))
        return (
            _is_usual(group)
            and _are_same(group["params"], self.weights)
            and all(_are_same([state.get(name) for state in self.states], tensors) for name, tensors in kept)
        )

    def update(self, group: Mapping[str, Any], gradients: list[Any], flag: torch.Tensor | None) -> None:
        foreach_add_(self.steps, self.counted)
        beta1, beta2 = group["betas"]
        kernel = fused_adamw_ if group["decoupled_weight_decay"] else fused_adam_
        kernel(
            self.weights,
            gradients,
            self.averages,
            self.squares,
            self.largest,
            self.steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=None,
            found_inf=flag,
        )


STATE, LARGEST = ("exp_avg", "exp_avg_sq", "step"), "max_exp_avg_sq"
"""What Adam keeps of a parameter, and what amsgrad keeps beside it."""


def _adam_lists(optimizer: Optimizer, counted: torch.Tensor) -> list[AdamLists]:
    """For each group; none at all where one is not plain, or has taken no step yet."""
    found = []
    for group in optimizer.param_groups:
        weights = group["params"]
        states = [optimizer.state.get(weight, {}) for weight in weights]
        names = (*STATE, *[LARGEST] * group["amsgrad"])
        kinds = {(type(weight), weight.device, weight.dtype) for weight in weights}
        is_plain = len(kinds) == 1 and weights[0].device == counted.device and not weights[0].is_complex()
        is_own = all(type(weight) in (torch.Tensor, nn.Parameter) for weight in weights)
        has_all = all(name in state for state in states for name in names)
        if not (is_plain and is_own and _is_usual(group) and has_all):
            return []
        averages, squares, steps = ([state[name] for state in states] for name in STATE)
        largest = [state[LARGEST] for state in states] if group["amsgrad"] else []
        found.append(AdamLists(list(weights), states, averages, squares, largest, steps, [counted] * len(weights)))
    return found


def _is_usual(group: Mapping[str, Any]) -> bool:
    """Whether the kernel takes the options of a group as they are."""
    numbers = group["lr"], *group["betas"]
    return (
        bool(group.get("fused"))
        and "decoupled_weight_decay" in group
        and not (group["capturable"] or group["differentiable"])
        and torch.Tensor not in map(type, numbers)
    )


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _fits(weight: torch.Tensor) -> bool:
    return weight.is_floating_point() and weight.device.type in ("cpu", "cuda")


MOST = 30
"""Tensors of a launch, at least: of five lists (amsgrad), and more where there are fewer."""
BLOCK = 65536
LEAST = 1024
"""Numbers of a slice; a multiple of it, so that slices are read as widely as whole tensors are."""
_KERNELS = tuple(getattr(torch.ops.aten, name) for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_"))


class Sliced(TorchDispatchMode):
    """Inside, fused updates get slices of large weights."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*(cut(args) if func.overloadpacket in _KERNELS else args), **(kwargs or {}))


def slice_length(sizes: list[int]) -> int:
    """Numbers of a slice, for tensors of these sizes: as few as one launch allows; 0 if that is enough for the GPU as
    it is, or too much for one launch.

    >>> slice_length([784 * 256, 256, 2560, 10]), slice_length([100] * 5), slice_length([10**8])
    (8192, 1024, 0)
    """
    if not sizes or len(sizes) > MOST or sum(sizes) >= MOST * BLOCK:
        return 0
    length = LEAST
    while sum(math.ceil(size / length) for size in sizes) > MOST:
        length += LEAST
    return length


def cut(lists: tuple[list[torch.Tensor], ...]) -> tuple[list[torch.Tensor], ...]:
    """The lists of a fused update (weights, gradients, averages, counts of steps), with slices in place of tensors."""
    weights = lists[0]
    length = slice_length([weight.numel() for weight in weights])
    if not length:
        return lists
    found: tuple[list[torch.Tensor], ...] = tuple([] for _ in lists)
    for place, weight in enumerate(weights):
        given = [one[place] if one else None for one in lists]
        is_cut = weight.numel() > length and all(_lies_like(tensor, weight) for tensor in given)
        for out, tensor in zip(found, given, strict=True):
            if tensor is None:
                continue
            if not is_cut:
                out.append(tensor)
            elif tensor.numel() == 1:
                out += [tensor] * math.ceil(weight.numel() / length)
            else:
                out += tensor.as_strided((weight.numel(),), (1,)).split(length)
    return found


def _lies_like(tensor: torch.Tensor | None, weight: torch.Tensor) -> bool:
    """Whether its numbers lie in memory as those of the weight do, without gaps; a list may be empty, and a step counts
    for all of its weight."""
    if tensor is None or tensor.numel() == 1:
        return True
    return tensor.stride() == weight.stride() and tensor.shape == weight.shape and fills_memory(weight)
