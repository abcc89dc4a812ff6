"""Which optimizers can be used at all: without a closure, on shards, on slices.

That is tried on a copy with small parameters: a list of names would not cover other people's optimizers.
"""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.checkpoint.shards import is_sharded, sharded_like
from evenstep.checkpoint.state_dict import whole
from evenstep.distributed.parameter_slices import cuts, is_slice
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.private_apis import (
    hooks_after_steps,
    hooks_before_steps,
)
from evenstep.sampling.rng import fork_rng, seed_devices, seed_host
from evenstep.strategy_facts import DEFAULT, sharding

if TYPE_CHECKING:
    from evenstep.training.whole_matrix_update import WholeUpdates

STEPS = 8
"""Enough for averages to differ, and for most of what an optimizer does every few steps."""
TOLERANCE = 1e-5
"""Relative to the update. The small parameters are float64; some optimizers compute in float32 by themselves."""
Place = Callable[[torch.Tensor], torch.Tensor]
"""Puts the values of a small parameter, or of its gradient, where they are to lie."""
Advance = Callable[[Any], Any]
"""Takes a step of an optimizer."""


def refuse_closure(optimizer: Optimizer) -> None:
    """Raise TaskError for an optimizer that computes the loss several times a step, as LBFGS and SAM do."""
    if _can_step(optimizer) or not _can_step(optimizer, with_closure=True):
        return
    raise TaskError(
        f"{type(optimizer).__name__}.step needs a closure that computes the loss again, and a step here computes it "
        "once;\nuse an optimizer whose step() needs none, such as AdamW or SGD"
    )


def sharded_updates(optimizer: Optimizer, world: World) -> WholeUpdates | None:
    """How it updates sharded parameters: whole ones, one by one, if it has to; all ranks call this.

    Muon and Adafactor need whole matrices, and some compute a norm of what is a slice. Raises TaskError, on all ranks,
    if that is not enough.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if world.ranks_per_replica > 1 and any(map(is_slice, weights)):
        _refuse_slices(optimizer, world)
    if not any(map(is_sharded, weights)):
        return None
    from evenstep.training.whole_matrix_update import WholeUpdates

    rehearsals = ShardedRehearsals(optimizer, world)
    found = rehearsals.problems() if rehearsals.are_possible else []
    if not found:
        return None
    if world.ranks_per_replica > 1:
        raise TaskError(_cannot_update_parts(optimizer, found[0]))
    on_shards = rehearsals.groups_on_shards()
    problems = rehearsals.problems(WholeUpdates(world, on_shards, is_trial=True).step)
    if problems:
        raise TaskError(
            f"{type(optimizer).__name__} cannot update sharded parameters as it updates whole ones: {problems[0]}.\n"
            f"Use it with {DEFAULT}; under {sharding()} use an optimizer that updates each parameter independently of "
            "the others, such as AdamW, SGD, Muon or Adafactor"
        )
    return WholeUpdates(world, on_shards)


class ShardedRehearsals:
    """Steps of small sharded parameters beside those of whole ones; all ranks run them together."""

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        # No rank is without a row, and the last one has fewer.
        self._rows = 3 * world.size - 1
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if is_sharded(weight)]
        self._like = {bool(weight.ndim): weight for weight in weights}
        """A parameter with dimensions, and one without, which all ranks hold whole."""
        self._expected = self._moved()
        again = self._moved(seed=1)
        self.are_possible = bool(self._expected) and all(map(torch.equal, self._expected, again))
        """Not if its first step raises a better error, nor if it draws random numbers."""

    def problems(self, advance: Advance | None = None, groups: frozenset[int] | None = None) -> list[str]:
        """What is wrong with steps of shards, of all groups or of some."""
        expected = self._expected if groups is None else self._moved(groups)
        if not expected:
            return ["its step fails with some groups alone"]
        rehearsal = Rehearsal(self._optimizer, self._rows, self._place, groups)
        problem = _problem(rehearsal, expected, advance)
        return [one for one in self._world.gather(problem) if one is not None]

    def groups_on_shards(self) -> frozenset[int]:
        """The numbers of groups that need no whole parameters: Muon has often a group for each of its two rules."""
        kinds: dict[Any, set[int]] = defaultdict(set)
        for number, group in enumerate(self._optimizer.param_groups):
            kinds[_rule(group)].add(number)
        right = [kind for kind in kinds.values() if len(kinds) > 1 and not self.problems(groups=frozenset(kind))]
        return frozenset().union(*right)

    def _moved(self, groups: frozenset[int] | None = None, seed: int = 0) -> list[torch.Tensor]:
        try:
            return Rehearsal(self._optimizer, self._rows, groups=groups).moved(seed)
        except Exception:
            return []

    def _place(self, values: torch.Tensor) -> torch.Tensor:
        return sharded_like(values, self._like[bool(values.ndim)])


def _rule(group: Mapping[str, Any]) -> Any:
    """What tells groups apart that may be updated by different rules: their options, and the values of flags."""
    flags = {key: value for key, value in group.items() if isinstance(value, bool | str)}
    return frozenset(group), frozenset(flags.items())


def _refuse_slices(optimizer: Optimizer, world: World) -> None:
    """The same for slices that are plain tensors: here each rank rehearses with its rows of the small parameters."""
    ranks = world.model_ranks
    rows = 3 * ranks.size - 1
    own = cuts(rows, ranks.size)[ranks.rank]

    def rows_of(values: torch.Tensor) -> torch.Tensor:
        return values[own.start : own.stop].clone() if values.ndim else values

    try:
        expected, again = (Rehearsal(optimizer, rows).moved(seed) for seed in range(2))
    except Exception:
        return
    if not all(map(torch.equal, expected, again)):
        return
    problem = _problem(Rehearsal(optimizer, rows, rows_of), [rows_of(one) for one in expected])
    problems = [one for one in world.gather(problem) if one is not None]
    if problems:
        raise TaskError(_cannot_update_parts(optimizer, problems[0]))


def _cannot_update_parts(optimizer: Optimizer, problem: str) -> str:
    return (
        f"{type(optimizer).__name__} cannot update parts of parameters as it updates whole ones: {problem}.\n"
        f"Use it with {DEFAULT}, or use an optimizer that updates each number independently, such as AdamW or SGD"
    )


def _problem(rehearsal: Rehearsal, expected: list[torch.Tensor], advance: Advance | None = None) -> str | None:
    """What is wrong with updates of shards."""
    try:
        moved = rehearsal.moved(advance=advance)
    except TaskError as error:
        return str(error)
    except Exception as error:
        first, *_ = re.split(r"\n|[.!] |[.!]$", str(error))
        return f"its step fails with {type(error).__name__}: {first[:120]}"
    for ours, theirs in zip(moved, expected, strict=True):
        difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-300))
        if not difference < TOLERANCE:
            shape = " x ".join(map(str, theirs.shape))
            return f"after {STEPS} steps the update of a {shape} parameter has a relative error of {difference:.1g}"
    return None


def _can_step(optimizer: Optimizer, with_closure: bool = False) -> bool:
    """Whether a step goes well; with a closure: and calls it, for it may have wanted any other argument."""
    try:
        rehearsal = Rehearsal(optimizer)
        with rehearsal.leaving_no_trace():
            rehearsal.step(with_closure)
    except Exception:
        return False
    return rehearsal.has_called_closure or not with_closure


class Rehearsal:
    """A copy of an optimizer, with two small parameters for each number of dimensions that a group has, or one.

    `groups` are the numbers of those that have any.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rows: int = 5,
        place: Place = lambda values: values,
        groups: frozenset[int] | None = None,
    ) -> None:
        self.has_called_closure = False
        self._rows, self._place = rows, place
        self._draws = torch.Generator().manual_seed(0)
        self._weights: list[nn.Parameter] = []
        self._shapes: list[tuple[int, ...]] = []
        """Of the whole parameters, where those are slices."""
        own = vars(optimizer)
        state: Any = defaultdict(dict)
        # deepcopy takes what its memo names as already copied.
        memo: dict[int, Any] = {id(own[name]): OrderedDict() for name in _HOOKS if name in own}
        for number, group in enumerate(optimizer.param_groups):
            memo |= self._in_place_of(group["params"], has_any=groups is None or number in groups)
            state.update({memo[id(weight)]: _small_state(own, weight, memo[id(weight)]) for weight in group["params"]})
        if "state" in own:
            memo[id(own["state"])] = state
        self._starts = [self._whole(weight) for weight in self._weights]
        self._optimizer: Any = object.__new__(type(optimizer))
        # A step that a scheduler or the user put there would move the original's parameters.
        vars(self._optimizer).update(copy.deepcopy({key: own[key] for key in own if key != "step"}, memo))
        for group in self._optimizer.param_groups:
            if group.get("lr") == 0:
                # As a warm-up may begin; nothing would move.
                group["lr"] = 0.01

    def step(self, with_closure: bool = False, advance: Advance | None = None) -> None:
        """One step, from gradients that are the same in every rehearsal."""
        self._set_gradients()
        if advance is not None:
            advance(self._optimizer)
        else:
            self._optimizer.step(*[self._closure] * with_closure)

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Around steps that leave the random generators as they were and call no global hooks."""
        devices = {weight.device for weight in self._weights if weight.is_cuda}
        with fork_rng(), torch.random.fork_rng(devices), without_hooks([hooks_before_steps, hooks_after_steps]):
            yield

    def moved(self, seed: int = 0, advance: Advance | None = None) -> list[torch.Tensor]:
        """How far some steps move each of the small parameters; `seed` is that of what they draw at random."""
        with self.leaving_no_trace():
            seed_host(seed)
            seed_devices([seed] * len(self._weights), tuple(weight.device for weight in self._weights))
            for _ in range(STEPS):
                self.step(advance=advance)
        return [self._whole(weight) - start for weight, start in zip(self._weights, self._starts, strict=True)]

    def _in_place_of(self, weights: list[nn.Parameter], has_any: bool) -> dict[int, Any]:
        """By id: what the copy has instead of these parameters, and of their list."""
        small: dict[tuple[int, bool, int], nn.Parameter] = {}
        replaced: dict[int, Any] = {}
        nums: Counter[tuple[int, bool]] = Counter()
        for weight in weights:
            kind = weight.ndim, weight.is_complex()
            # Two of a kind: an update may depend on other parameters.
            place = *kind, nums[kind] % 2
            nums[kind] += 1
            if place not in small:
                small[place] = nn.Parameter(self._drawn(_small_shape(weight, self._rows), like=weight))
            replaced[id(weight)] = small[place]
        own = list(small.values()) if has_any else []
        self._weights += own
        self._shapes += [_small_shape(weight, self._rows) for weight in own]
        return {**replaced, id(weights): own}

    def _set_gradients(self) -> None:
        for weight, shape in zip(self._weights, self._shapes, strict=True):
            weight.grad = self._drawn(shape, like=weight)

    def _closure(self) -> torch.Tensor:
        self.has_called_closure = True
        self._set_gradients()
        return torch.zeros(())

    def _drawn(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        dtype = torch.complex128 if like.is_complex() else torch.float64
        values = torch.randn(shape, generator=self._draws, dtype=dtype)
        return self._place(values if like.is_meta else values.to(like.device))

    def _whole(self, weight: torch.Tensor) -> torch.Tensor:
        values = whole(weight, keep=True)
        assert values is not None
        return values


def _small_shape(weight: torch.Tensor, rows: int) -> tuple[int, ...]:
    return (rows, 4, 3, *[2] * weight.ndim)[: weight.ndim]


def _small_state(own: Mapping[str, Any], weight: nn.Parameter, small: nn.Parameter) -> dict[str, Any]:
    """What an optimizer keeps of a parameter from its making on, as Adagrad does, or from a checkpoint."""
    kept = own.get("state", {}).get(weight, {})
    return {
        key: torch.zeros_like(small) if isinstance(value, torch.Tensor) and value.ndim else copy.deepcopy(value)
        for key, value in kept.items()
    }


@contextmanager
def without_hooks(every: Sequence[dict[int, Any]]) -> Iterator[None]:
    """Inside, these hooks are not registered."""
    kept = [dict(hooks) for hooks in every]
    for hooks in every:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(every, kept, strict=True):
            hooks.update(before)


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
