"""Where a model is cut into the stages of a pipeline: between two blocks of a list that forward runs one after another.

One computation of the loss is watched: which list of blocks is run in order, each with the output of the one before and
no other tensor; which parameters are used before the first block, in each of them, and behind the last one; how long
each block takes. A model that does not look like this is refused, with the reason.
"""

from __future__ import annotations

import inspect
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.pipeline_balance import balanced, block_costs
from evenstep.pipeline_schedule import chunks_of
from evenstep.private_apis import tree_leaves
from evenstep.strategies.base import Sample, copied

TIMED = 3
"""Computations of the loss, of which the fastest of each block counts."""
BEFORE, BEHIND = -1, -2
"""Where a parameter is used that is in no block."""


@dataclass(frozen=True)
class StageCut:
    """Which rank of a replica runs which part of a model.

    With several chunks on each rank, there are as many stages as chunks, and ranks take them in turn.
    """

    blocks: list[str]
    """Names of the blocks, in order."""
    stage_of: list[int]
    """For each block."""
    stages: dict[str, int]
    """That of each parameter and buffer."""
    num_ranks: int
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]
    """What each block gets besides its input."""
    before: list[str] = field(default_factory=list)
    """Buffers that are used before the first block."""

    @property
    def num_stages(self) -> int:
        return self.stage_of[-1] + 1

    @property
    def owners(self) -> dict[str, int]:
        """The rank of each parameter and buffer."""
        return {name: stage % self.num_ranks for name, stage in self.stages.items()}

    def own(self, stage: int) -> list[int]:
        """The blocks of a stage, by index."""
        return [index for index, of_block in enumerate(self.stage_of) if of_block == stage]


def find_cut(model: nn.Module, world: World, sample: Sample | None, *, is_timed: bool = True) -> StageCut:
    """The cut, which is the same on all ranks; they call this together. Not timed, it is by parameters alone."""
    num = world.ranks_per_replica * chunks_of(world.schedule)
    if sample is None:
        raise TaskError("pipeline needs a computation of the loss: team.wrap(model, lambda model: loss(model, data))")
    lists = [name for name, one in model.named_modules() if _is_list(one) and len(list(one.children())) >= num]
    if not lists:
        raise TaskError(_too_few(model, world, num))
    problems: list[str] = []
    for name in sorted(lists, key=lambda name: -_size(model.get_submodule(name))):
        blocks = [f"{name}.{key}".lstrip(".") for key, _ in model.get_submodule(name).named_children()]
        copy = copied(model)
        passes = [BlockUses(copy, blocks) for _ in range(TIMED if is_timed else 1)]
        for watched in passes:
            with torch.no_grad(), watched:
                sample(copy)
        # The first computation is slower, above all that of the first block; another process may slow down any.
        seconds = [min(times) if is_timed else 0.0 for times in zip(*(one.seconds for one in passes), strict=True)]
        found = world.gather([watched.problem(), watched.uses(), seconds])
        problem = next((one[0] for one in found if one[0]), None)
        if problem is None:
            return _made(model, blocks, found[0], watched, world)
        problems.append(f"{name or 'the model'}: {problem}")
    raise TaskError(f"pipeline cannot cut this model: {'; '.join(problems[:3])};\nuse fsdp, or ddp")


def _is_list(module: nn.Module) -> bool:
    return type(module) is nn.ModuleList or getattr(type(module), "forward", None) is nn.Sequential.forward


def _too_few(model: nn.Module, world: World, num: int) -> str:
    most = max((len(list(one.children())) for one in model.modules() if _is_list(one)), default=0)
    found = f"the longest list of this model has {most}" if most > 1 else "this model has no such list"
    changes = []
    if most >= world.ranks_per_replica:
        changes.append("use --pipeline-schedule 1f1b, which needs one block a rank")
    chunks = chunks_of(world.schedule)
    fewer = [n for n in range(2, world.ranks_per_replica) if world.size % n == 0 and n * chunks <= most]
    if fewer:
        changes.append(f"use --stages {fewer[-1]}")
    changes.append("put its layers into one nn.Sequential, in the order of forward")
    return (
        f"pipeline cuts a model between blocks of an nn.Sequential or nn.ModuleList, of which it needs {num} or more, "
        f"and {found};\n{', or '.join(changes)}, or use fsdp"
    )


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _made(model: nn.Module, blocks: list[str], found: Any, watched: BlockUses, world: World) -> StageCut:
    _, uses, seconds = found
    num = world.ranks_per_replica * chunks_of(world.schedule)
    weights = [_size(model.get_submodule(name)) for name in blocks]
    outside = {BEFORE: 0, BEHIND: 0}
    for name, weight in model.named_parameters():
        if uses.get(name, BEFORE) in outside:
            outside[uses.get(name, BEFORE)] += weight.numel()
    costs = block_costs(weights, seconds, outside[BEFORE], outside[BEHIND])
    stage_of = balanced(costs, num)
    place = {BEFORE: 0, BEHIND: num - 1, **dict(enumerate(stage_of))}
    # What nothing used stays with the first stage.
    named = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    stages = {name: place[uses.get(name, BEFORE)] for name in named}
    before = [name for name, _ in model.named_buffers() if uses.get(name) == BEFORE]
    return StageCut(blocks, stage_of, stages, world.ranks_per_replica, watched.arguments, before)


class BlockUses(TorchFunctionMode):
    """Inside, notes in which order blocks run, with what, and where parameters and buffers are used."""

    def __init__(self, model: nn.Module, blocks: list[str]) -> None:
        super().__init__()
        self.model = model
        self.seconds = [0.0] * len(blocks)
        self.arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._blocks = blocks
        self._num_calls = 0
        self._is_running = False
        self._inside: int | None = None
        self._last: Any = None
        self._problem: str | None = None
        self._uses: dict[str, set[int]] = {}
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(one): name for name, one in named}
        self._hooks = ExitStack()
        self._began = 0.0

    def __enter__(self) -> BlockUses:
        for index, name in enumerate(self._blocks):
            block = self.model.get_submodule(name)
            before = block.register_forward_pre_hook(
                lambda _, args, named, index=index: self._entered(index, args, named), with_kwargs=True
            )
            after = block.register_forward_hook(lambda _, args, out, index=index: self._left(index, out))
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        first = self.model.register_forward_pre_hook(lambda *_: self._called())
        last = self.model.register_forward_hook(lambda *_: self._ended())
        self._hooks.callback(first.remove)
        self._hooks.callback(last.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _say(self, problem: str) -> None:
        self._problem = self._problem or problem

    def _called(self) -> None:
        self._num_calls += 1
        self._is_running = True
        if self._num_calls > 1:
            self._say("the loss calls the model more than once")

    def _ended(self) -> None:
        self._is_running = False

    def _entered(self, index: int, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._is_running:
            self._say("the loss runs its blocks without calling the model itself: write model(x)")
        if len(self.arguments) != index:
            self._say("its blocks do not run one after another, each once")
        given = self._others(index, args, named)
        if given:
            self._say(f"its blocks take other tensors than the output of the one before ({', '.join(given)})")
        elif not args or not isinstance(args[0], torch.Tensor):
            self._say("its blocks take something else than one tensor, the output of the one before")
        elif index and args[0] is not self._last:
            self._say("something is computed between two of its blocks")
        self.arguments.append((args[1:], dict(named)))
        self._inside, self._began = index, time.perf_counter()

    def _others(self, index: int, args: tuple[Any, ...], named: dict[str, Any]) -> list[str]:
        """The arguments of a block, besides its first, that hold tensors: by their names in forward."""
        block = self.model.get_submodule(self._blocks[index])
        try:
            known = list(inspect.signature(block.forward).parameters)
        except (TypeError, ValueError):  # compiled, or written in C
            known = []
        names = [*known[: len(args)], *(f"argument {at + 1}" for at in range(len(known), len(args)))]
        given = {**dict(zip(names[1:], args[1:], strict=True)), **named}
        return [name for name, value in given.items() if any(isinstance(x, torch.Tensor) for x in tree_leaves(value))]

    def _left(self, index: int, out: Any) -> None:
        self.seconds[index] += time.perf_counter() - self._began
        self._inside, self._last = None, out

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(one, torch.Tensor) for one in tree_leaves(result)):
            for one in tree_leaves((args, kwargs)):
                if id(one) in self._names:
                    self._used(self._names[id(one)])
        return result

    def _used(self, name: str) -> None:
        if not self._is_running:
            self._say(f"{name} is used outside of forward")
        where = self._inside
        if where is None:
            where = BEFORE if not self.arguments else BEHIND
        self._uses.setdefault(name, set()).add(where)

    def problem(self) -> str | None:
        """Why the model cannot be cut between these blocks."""
        several = [name for name, places in self._uses.items() if len(places) > 1]
        if self._problem is None and len(self.arguments) != len(self._blocks):
            return "its blocks do not run one after another, each once"
        if self._problem is None and several:
            return f"{several[0]} is used in several parts of the model, as tied weights are"
        return self._problem

    def uses(self) -> dict[str, int]:
        """Where each parameter and buffer is used: the index of a block, before the first or behind the last."""
        return {name: min(places) for name, places in self._uses.items()}
