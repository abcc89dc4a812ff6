"""Optimizers that need whole parameters, where these are sharded: Muon, Adafactor, and others.

Each parameter is whole for a moment, on one rank. In every round each rank gets some parameters, their gradients and
their state from all ranks, lets the optimizer update them one by one, and sends all ranks their rows of the result: two
messages a round, and all ranks compute at the same time. In a round a rank has no more numbers of parameters than the
largest one has. In between, parameters and state of their shape are sharded as ever, so that checkpoints need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from evenstep.checkpoint.shards import is_sharded, with_rows
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.private_apis import hooks_after_steps, hooks_before_steps, note_step_for_scheduler, step_hooks
from evenstep.training.optimizer_compatibility import without_hooks

ALIGNMENT = 16
"""Bytes; a tensor in a message begins at a multiple of it."""
NUMBERS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool}
"""Types of state that travel as numbers."""


def rounds(sizes: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Which parameters each rank updates in each round, by their numbers; large ones first.

    >>> rounds([2, 9, 5, 1, 8], 2)
    [[[1], [4, 3]], [[2], [0]]]
    """
    found: list[list[list[int]]] = []
    loads: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        place = next((number for number, load in enumerate(loads) if min(load) + sizes[index] <= max(sizes)), None)
        if place is None:
            place = len(found)
            found.append([[] for _ in range(num_ranks)])
            loads.append([0] * num_ranks)
        rank = loads[place].index(min(loads[place]))
        found[place][rank].append(index)
        loads[place][rank] += sizes[index]
    return found


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps of a parameter under one name."""

    key: str
    kind: str
    """"rows" of a tensor of the parameter's shape, another tensor, "whole", "none", or the type of a number."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    """The kind of device, of one number: a GPU's optimizer counts its steps on the CPU."""

    @classmethod
    def of(cls, key: str, value: Any, weight: torch.Tensor) -> Kept:
        if isinstance(value, torch.Tensor):
            kind = "rows" if value.ndim and value.shape == weight.shape else "whole"
            return cls(key, kind, tuple(value.shape), str(value.dtype).removeprefix("torch."), value.device.type)
        name = "none" if value is None else type(value).__name__
        if name != "none" and name not in NUMBERS:
            raise TaskError(f"it keeps a {name} of each parameter ({key!r}), and only tensors and numbers are sent")
        return cls(key, name)

    def spec(self, rows: torch.Size) -> Spec | None:
        """What a rank with these rows of the parameter gets of it."""
        if self.kind == "none":
            return None
        if self.kind in NUMBERS:
            return torch.Size(()), torch.float64
        return rows if self.kind == "rows" else torch.Size(self.shape), getattr(torch, self.dtype)


Spec = tuple[torch.Size, torch.dtype]
"""Shape and type of a tensor in a message."""


@dataclass(frozen=True)
class Shard:
    """A parameter that is whole for a moment, and how ranks hold it."""

    weight: Any
    group: int
    """The number of its group of parameters."""

    @property
    def num_ranks(self) -> int:
        return int(self.weight.device_mesh.size(-1))

    def rows(self, rank: int) -> slice:
        """Of a rank; the last ones may have fewer, or none."""
        num = -(-len(self.weight) // self.num_ranks)
        return slice(min(rank * num, len(self.weight)), min((rank + 1) * num, len(self.weight)))

    def rows_shape(self, rank: int) -> torch.Size:
        """Of what a rank holds: all of a parameter without dimensions."""
        if not self.weight.ndim:
            return torch.Size(())
        rows = self.rows(rank)
        return torch.Size((rows.stop - rows.start, *self.weight.shape[1:]))

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank gets of it."""
        return whole[self.rows(rank)] if self.weight.ndim else whole

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of what all ranks hold, in a memory of its own."""
        return torch.cat(list(parts)) if self.weight.ndim else parts[0].clone()


CHANGED = "it keeps other things of a parameter than after its first update"


class WholeUpdates:
    """Steps of an optimizer; the parameters of some groups are whole where it computes with them.

    In a trial, ranks compare in every round what they keep, so that what goes wrong does so on all of them.
    """

    def __init__(self, world: World, on_shards: frozenset[int] = frozenset(), is_trial: bool = False) -> None:
        self._world = world
        self._is_trial = is_trial
        self._on_shards = on_shards
        """The numbers of groups whose shards the optimizer can update as they are."""
        self._kept: dict[torch.Tensor, list[Kept]] = {}
        """What is kept of each parameter, as all ranks know since its first update."""
        self._rounds: tuple[list[torch.Tensor], list[list[list[int]]]] = [], []
        """Of these parameters."""

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """`optimizer.step()`; all ranks call this."""
        note_step_for_scheduler(optimizer, vars(optimizer).get("step", type(optimizer).step))
        before, after = step_hooks(optimizer)
        _call(optimizer, [*hooks_before_steps.values(), *before.values()])
        with without_hooks([hooks_before_steps, hooks_after_steps, before, after]):
            every = [
                Shard(weight, number)
                for number, group in enumerate(optimizer.param_groups)
                for weight in group["params"]
                if number not in self._on_shards and weight.grad is not None
            ]
            for owned in self._planned(every):
                self._update(optimizer, [[every[index] for index in of_rank] for of_rank in owned])
            rest = {number: optimizer.param_groups[number]["params"] for number in self._on_shards}
            with _only(optimizer, rest):
                type(optimizer).step(optimizer)
        _call(optimizer, [*after.values(), *hooks_after_steps.values()])

    def _planned(self, every: Sequence[Shard]) -> list[list[list[int]]]:
        weights = [one.weight for one in every]
        before, plan = self._rounds
        if len(before) != len(weights) or any(one is not other for one, other in zip(before, weights, strict=True)):
            plan = rounds([weight.numel() for weight in weights], every[0].num_ranks) if every else []
            self._rounds = weights, plan
        return plan

    def _update(self, optimizer: Optimizer, owned: Sequence[Sequence[Shard]]) -> None:
        """One round, of what each rank updates."""
        every = [one for of_rank in owned for one in of_rank]
        exchange = PackedAllToAll(self._world, every[0].weight.device_mesh)
        own = owned[exchange.rank]
        learns = self._is_trial or any(one.weight not in self._kept for one in every)
        results: list[tuple[torch.Tensor, dict[str, Any]]] = []
        found: list[list[Kept]] = []
        problem = ""
        whole = _gathered(optimizer, owned, exchange)
        try:
            results = [_updated(optimizer, *one) for one in zip(own, whole, strict=True)]
            found = [_kept_of(state, shard) for shard, (_, state) in zip(own, results, strict=True)]
        except Exception as error:
            if not learns:
                raise
            # Others wait for what this rank keeps.
            problem = _in_words(error)
        del whole
        if learns:
            self._learn(owned, {"rank": exchange.rank, "kept": _as_json(found), "problem": problem})
        if found != [self._kept[one.weight] for one in own]:
            raise TaskError(f"{type(optimizer).__name__}: {CHANGED}")
        if not self._world.communication.is_off:
            self._scatter(optimizer, owned, exchange, results)

    def _learn(self, owned: Sequence[Sequence[Shard]], own: dict[str, Any]) -> None:
        """Let all ranks know what is kept of each parameter; raise on all of them if the step of one failed."""
        answers = self._world.gather(own)
        problems = [answer["problem"] for answer in answers if answer["problem"]]
        if problems:
            raise TaskError(problems[0])
        for answer in answers:
            for one, of_weight in zip(owned[answer["rank"]], answer["kept"], strict=True):
                kept = [Kept(key, kind, tuple(shape), *more) for key, kind, shape, *more in of_weight]
                if self._kept.setdefault(one.weight, kept) != kept:
                    raise TaskError(CHANGED)

    def _scatter(
        self,
        optimizer: Optimizer,
        owned: Sequence[Sequence[Shard]],
        exchange: PackedAllToAll,
        results: Sequence[tuple[torch.Tensor, dict[str, Any]]],
    ) -> None:
        """Give all ranks their rows of updated parameters, and what else is kept of them."""
        sent: list[list[torch.Tensor]] = [[] for _ in owned]
        for shard, (weight, state) in zip(owned[exchange.rank], results, strict=True):
            for rank, to_rank in enumerate(sent):
                to_rank.append(shard.part(weight, rank))
                to_rank += [_sendable(state[one.key], one, shard, rank) for one in self._sent(shard)]
        expected = [[spec for shard in of_rank for spec in self._specs(shard, exchange.rank)] for of_rank in owned]
        arrived = exchange(sent, expected)
        for of_rank, parts in zip(owned, map(iter, arrived), strict=True):
            for shard in of_rank:
                shard.weight.to_local().copy_(next(parts))
                self._keep(optimizer.state[shard.weight], shard, parts)

    def _sent(self, shard: Shard) -> list[Kept]:
        return [one for one in self._kept[shard.weight] if one.kind != "none"]

    def _specs(self, shard: Shard, rank: int) -> list[Spec]:
        rows = shard.rows_shape(rank)
        specs = [one.spec(rows) for one in self._kept[shard.weight]]
        return [(rows, shard.weight.dtype), *(spec for spec in specs if spec is not None)]

    def _keep(self, state: dict[str, Any], shard: Shard, parts: Iterator[torch.Tensor]) -> None:
        """Make what arrived the state of a sharded parameter."""
        kept = self._kept[shard.weight]
        for key in [key for key in state if key not in {one.key for one in kept}]:
            del state[key]
        for one in kept:
            if one.kind == "none":
                state[one.key] = None
            elif one.kind in NUMBERS:
                state[one.key] = NUMBERS[one.kind](next(parts).item())
            else:
                _put(state, one, next(parts), shard.weight)


def _as_json(found: Sequence[Sequence[Kept]]) -> list[Any]:
    return [list(map(astuple, of_weight)) for of_weight in found]


def _put(state: dict[str, Any], one: Kept, values: torch.Tensor, weight: Any) -> None:
    """Where there was such a tensor, into it: its memory stays the same."""
    before = state.get(one.key)
    local = before.to_local() if is_sharded(before) else before
    was_like_it = is_sharded(before) == (one.kind == "rows")
    if was_like_it and isinstance(local, torch.Tensor) and (local.shape, local.dtype) == (values.shape, values.dtype):
        local.copy_(values)
        return
    # Of its own: what arrived is a part of a message.
    own = values.to(weight.device if values.ndim else one.device, copy=True)
    state[one.key] = with_rows(own, weight) if one.kind == "rows" else own


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, TaskError) else f"its step fails with {type(error).__name__}: {error}"


def _sendable(value: Any, one: Kept, shard: Shard, rank: int) -> torch.Tensor:
    if one.kind in NUMBERS:
        return torch.tensor(value, dtype=torch.float64)
    return shard.part(value, rank) if one.kind == "rows" else value


def _kept_of(state: Mapping[str, Any], shard: Shard) -> list[Kept]:
    # In one order: loaded state has another one than state that the optimizer made.
    return [Kept.of(key, state[key], shard.weight) for key in sorted(state)]


Whole = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""A parameter, its gradient and its state."""


def _gathered(optimizer: Optimizer, owned: Sequence[Sequence[Shard]], exchange: PackedAllToAll) -> list[Whole]:
    """What this rank updates, from the rows of all ranks."""
    sent = [
        [one.to_local() for shard in of_rank for one in _tensors_of(optimizer, shard).values()] for of_rank in owned
    ]
    own = owned[exchange.rank]
    expected = [
        [(shard.rows_shape(rank), one.dtype) for shard in own for one in _tensors_of(optimizer, shard).values()]
        for rank in range(len(owned))
    ]
    arrived = list(map(iter, exchange(sent, expected)))
    found = []
    for shard in own:
        names = list(_tensors_of(optimizer, shard))
        weight, gradient, *rest = (shard.joined([next(parts) for parts in arrived]) for _ in names)
        kept = optimizer.state.get(shard.weight, {})
        # Where shards are in host memory, so is what ranks hold whole.
        state = {key: one.to(weight.device) if _has_dimensions(one) else one for key, one in kept.items()}
        found.append((weight, gradient, {**state, **dict(zip(names[2:], rest, strict=True))}))
    return found


def _has_dimensions(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_sharded(value) and value.ndim > 0


def _tensors_of(optimizer: Optimizer, shard: Shard) -> dict[str, Any]:
    """What ranks hold rows of: the parameter, its gradient, and state of its shape by name."""
    state = optimizer.state.get(shard.weight, {})
    return {
        "the parameter": shard.weight.detach(),
        "its gradient": shard.weight.grad,
        **{key: value for key, value in state.items() if is_sharded(value)},
    }


def _updated(optimizer: Optimizer, shard: Shard, whole: Whole) -> tuple[torch.Tensor, dict[str, Any]]:
    """A parameter and its state after a step in which the optimizer has no other."""
    values, gradient, state = whole
    weight = nn.Parameter(values)
    weight.grad = gradient
    if state:
        optimizer.state[weight] = state
    try:
        with _only(optimizer, {shard.group: [weight]}, keeps_options=True):
            type(optimizer).step(optimizer)
    finally:
        after = dict(optimizer.state.pop(weight, {}))
    return weight.detach(), after


@contextmanager
def _only(optimizer: Optimizer, members: Mapping[int, list[Any]], keeps_options: bool = False) -> Iterator[None]:
    """Inside, an optimizer has these parameters alone, by the number of their group.

    Where it `keeps_options`, what a step changes in groups, such as a count of steps, is changed back.
    """
    groups = list(optimizer.param_groups)
    before = [dict(group) for group in groups]
    for number, group in enumerate(groups):
        group["params"] = members.get(number, [])
    try:
        yield
    finally:
        for group, options in zip(groups, before, strict=True):
            group.update(options if keeps_options else {"params": options["params"]})


def _call(optimizer: Optimizer, hooks: Sequence[Callable[..., Any]]) -> None:
    for hook in hooks:
        hook(optimizer, (), {})


class PackedAllToAll:
    """Sends every rank of a mesh some tensors, of whatever types, in one message."""

    def __init__(self, world: World, mesh: Any) -> None:
        self._world = world
        self._device = world.device
        self._group = mesh.get_group(mesh.ndim - 1)
        self.rank = int(mesh.get_local_rank(mesh.ndim - 1))

    def __call__(
        self, sent: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Spec]]
    ) -> list[list[torch.Tensor]]:
        """What each rank sent this one; `sent` is for each rank, and `expected` what comes from each."""
        lengths = [sum(_aligned(shape.numel() * dtype.itemsize) for shape, dtype in specs) for specs in expected]
        message = _packed([one for tensors in sent for one in tensors], self._device)
        to_ranks = [sum(_aligned(one.nbytes) for one in tensors) for tensors in sent]
        received = torch.zeros(sum(lengths), dtype=torch.uint8, device=self._device)
        if not self._world.communication.is_off:
            self._world.heartbeat.collective()
            arrived = self._world.spans.send("all-to-all", [message], waits=True)
            dist.all_to_all_single(received, message, lengths, to_ranks, group=self._group)
            arrived()
        return [_unpacked(part, specs) for part, specs in zip(received.split(lengths), expected, strict=True)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _packed(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Their bytes, one after the other."""
    message = torch.zeros(sum(_aligned(one.nbytes) for one in tensors), dtype=torch.uint8, device=device)
    start = 0
    for one in tensors:
        message[start : start + one.nbytes] = one.contiguous().reshape(-1).view(torch.uint8)
        start += _aligned(one.nbytes)
    return message


def _unpacked(message: torch.Tensor, specs: Sequence[Spec]) -> list[torch.Tensor]:
    """Views of a message as tensors."""
    found = []
    start = 0
    for shape, dtype in specs:
        num_bytes = shape.numel() * dtype.itemsize
        found.append(message[start : start + num_bytes].view(dtype).view(shape))
        start += _aligned(num_bytes)
    return found
