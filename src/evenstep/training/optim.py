"""The optimizer step: clipping, fp16's GradScaler, fused kernels, and which optimizers can be used at all.

Whether an optimizer works without a closure and on sharded parameters is tried on a copy with small parameters: a list
of names would not cover other people's optimizers.

torch's fused kernels give each block of a GPU 65,536 numbers of a tensor, so that a small network occupies few blocks.
`Sliced` cuts its tensors into more, with the same arithmetic for every number. A launch takes 30 tensors or more, so
up to that number slices cost nothing.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from evenstep.checkpoint.shards import is_any_sharded, is_sharded, sharded_like
from evenstep.checkpoint.state import whole
from evenstep.distributed.parameter_slices import cuts, is_slice, slice_of
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.internals import (
    TorchDispatchMode,
    foreach_add_,
    fused_adam_,
    fused_adamw_,
    hooks_after_steps,
    hooks_before_steps,
    infinity_flags,
    is_profiling,
    make_fused,
    note_step_for_scheduler,
)
from evenstep.sampling.rng import fork_rng, seed_devices, seed_host
from evenstep.strategies.base import NOTHING, fills_memory, forget_gradients, has_sparse_gradients, update
from evenstep.strategy_facts import DEFAULT, sharding
from evenstep.task import takes_model

if TYPE_CHECKING:
    from evenstep.training.whole_update import WholeUpdates

STEPS = 8
"""Enough for averages to differ, and for most of what an optimizer does every few steps."""
TOLERANCE = 1e-5
"""Relative to the update. The small parameters are float64; some optimizers compute in float32 by themselves."""

Place = Callable[[torch.Tensor], torch.Tensor]
"""Puts the values of a small parameter, or of its gradient, where they are to lie."""
Advance = Callable[[Any], Any]
"""Takes a step of an optimizer."""


def make_optimizer(function: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    """`optimizer(parameters)` or `optimizer(model)`, as the function takes it; the model's names are the user's own."""
    made = function(model if takes_model(function) else model.parameters())
    if not hasattr(made, "param_groups"):
        raise TaskError(f"Task.optimizer returned a {type(made).__name__}; it must return a torch.optim.Optimizer")
    return made


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
    from evenstep.training.whole_update import WholeUpdates

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
            return f"after {STEPS} steps a parameter of {shape} is off by {difference:.1g} of what it moved"
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


class WeightUpdate(int):
    """Whether the weights were updated, as an int: 0 if fp16's GradScaler skipped it. It knows the `grad_norm`."""

    grad_norm: torch.Tensor | None
    """Before clipping, on the device; None where nothing is clipped."""

    def __new__(cls, was_taken: bool, grad_norm: torch.Tensor | None) -> WeightUpdate:
        self = super().__new__(cls, was_taken)
        self.grad_norm = grad_norm
        return self


def clip_gradients(
    optimizer: Optimizer, clip: float, *, is_exact: bool = False, ranks: World | None = None
) -> torch.Tensor:
    """`clip_grad_norm_` of all its parameters; returns their norm, of sharded ones too.

    Where it `is_exact`, the norm has the same bits wherever the gradients are. `ranks` hold parts of one replica each.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    # A norm of all gradients is rounded differently in another order.
    weights = getattr(optimizer, "in_order_of_model", weights)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if ranks is not None:
        norm = _norm_of_slices(weights, ranks)
    else:
        norm = _exact_norm(gradients) if is_exact else torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if is_sharded(norm) else norm
    torch.nn.utils.clip_grads_with_norm_(weights, clip, norm)
    return norm


def _norm_of_slices(weights: Sequence[torch.Tensor], ranks: World) -> torch.Tensor:
    """Of a replica whose parameters are split over ranks: slices are of all ranks, whole ones are counted once."""
    counted = [
        weight.grad
        for weight in weights
        if weight.grad is not None and (slice_of(weight) is not None or ranks.rank == 0)
    ]
    own = torch.nn.utils.get_total_norm(counted)
    # Of shards: over the ranks that hold them, first.
    own = own.full_tensor() if is_sharded(own) else own
    square = own.double().to(ranks.device).square()
    work = ranks.total(square)
    if work is not None:
        work.wait()
    return square.sqrt().to(own.dtype)


def _exact_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensor by tensor, each of them whole: slices of it have sums that are rounded differently."""
    if not gradients:
        return torch.tensor(0.0)
    norms = [torch.linalg.vector_norm(one.full_tensor() if is_sharded(one) else one) for one in gradients]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


@dataclass(frozen=True)
class UpdateSettings:
    """What an update depends on beside the optimizer."""

    scaler: torch.amp.GradScaler | None = None
    is_exact: bool = False
    """Whether it is to have the same bits wherever the parameters are."""
    ranks: World | None = None
    """Those that hold parts of one replica each."""
    whole: WholeUpdates | None = None
    """How sharded parameters are updated that the optimizer needs whole."""


def step_optimizer(optimizer: Optimizer, clip: float | None, settings: UpdateSettings) -> WeightUpdate:
    """Clip the gradients to a total norm, update the weights, drop the gradients."""
    scaler, is_exact = settings.scaler, settings.is_exact
    if scaler is not None:
        scaler.unscale_(optimizer)
        _share_infinities(optimizer, scaler)
    norm = clip_gradients(optimizer, clip, is_exact=is_exact, ranks=settings.ranks) if clip is not None else None
    taken = True
    start_momentum(optimizer)
    around = _same_on_shards(optimizer) if is_exact else NOTHING
    with around:
        if scaler is None:
            _update(optimizer, settings.whole)
        elif settings.whole is None:
            scaler.step(optimizer)
        elif not any(flag.item() for flag in infinity_flags(scaler, optimizer)):
            settings.whole.step(optimizer)
    if scaler is not None:
        before = scaler.get_scale()
        scaler.update()
        taken = scaler.get_scale() >= before
    forget_gradients(optimizer)
    return WeightUpdate(taken, norm)


def _update(optimizer: Optimizer, whole: WholeUpdates | None) -> None:
    if whole is None:
        update(optimizer)
    else:
        whole.step(optimizer)


def _share_infinities(optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Let all ranks skip a step if a shard of one is not finite.

    torch shares what each found, unless the first parameter is one that all ranks hold whole.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    scalar = next((weight for weight in weights if is_sharded(weight) and not weight.ndim), None)
    if scalar is not None and is_sharded(scalar):
        for flag in infinity_flags(scaler, optimizer):
            for dim in range(scalar.device_mesh.ndim):
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=scalar.device_mesh.get_group(dim))


def _is_same_on_shards(weights: Sequence[torch.Tensor]) -> bool:
    """Whether a fused update of slices can be given the bits of an update of the whole."""
    from evenstep.training.sharded_update import vector_bytes

    return all(weight.device.type != "cpu" for weight in weights) or vector_bytes() is not None


def _same_on_shards(optimizer: Optimizer) -> AbstractContextManager[Any]:
    """Around an update that is to have the same bits on shards as on whole parameters."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if not is_any_sharded(weights) or not is_fused(optimizer) or weights[0].device.type != "cpu":
        return NOTHING
    from evenstep.training.sharded_update import ShardedUpdates

    return ShardedUpdates()  # type: ignore[no-untyped-call]


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

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state: Any = None
        self._sizes = 0, 0
        """Of the state and of the groups when the lists were made, or found not to be usable."""
        self._lists: list[AdamLists] = []
        self._one = self._counted = torch.ones(())

    def recheck(self) -> None:
        """The optimizer may have been changed between two steps."""
        self._state = None

    def step(self, flag: torch.Tensor) -> bool:
        """One step, which does nothing where `flag` is 1; False if torch has to take it itself."""
        optimizer = self._optimizer
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or is_profiling():
            return False
        sizes = len(optimizer.state), len(optimizer.param_groups)
        if self._state is not optimizer.state or self._sizes != sizes:
            self._one, self._counted = torch.ones_like(flag), torch.ones_like(flag)
            self._lists = _adam_lists(optimizer, self._counted)
            self._state, self._sizes = optimizer.state, sizes
        gradients = [[weight.grad for weight in lists.weights] for lists in self._lists]
        if not self._lists or any(gradient is None for of_group in gradients for gradient in of_group):
            return False
        note_step_for_scheduler(optimizer, getattr(optimizer, "__dict__", {}).get("step", type(optimizer).step))
        with torch.no_grad():
            torch.sub(self._one, flag, out=self._counted)
            for lists, group, of_group in zip(self._lists, optimizer.param_groups, gradients, strict=True):
                lists.update(group, of_group, flag)
        return True


@dataclass(slots=True)
class AdamLists:
    """What the kernel takes of one group of parameters, besides the gradients."""

    weights: list[torch.Tensor]
    averages: list[torch.Tensor]
    squares: list[torch.Tensor]
    largest: list[torch.Tensor]
    """Of amsgrad; otherwise none."""
    steps: list[torch.Tensor]
    counted: list[torch.Tensor]
    """What is added to each of these, always the same tensor: adding a tensor itself would read it."""

    def update(self, group: Mapping[str, Any], gradients: list[Any], flag: torch.Tensor) -> None:
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


def _adam_lists(optimizer: Optimizer, counted: torch.Tensor) -> list[AdamLists]:
    """For each group; none at all where one is not plain, or has taken no step yet."""
    found = []
    for group in optimizer.param_groups:
        weights = group["params"]
        states = [optimizer.state.get(weight, {}) for weight in weights]
        names = ("exp_avg", "exp_avg_sq", "step", *["max_exp_avg_sq"] * group["amsgrad"])
        kinds = {(weight.device, weight.dtype) for weight in weights}
        is_plain = len(kinds) == 1 and weights[0].device == counted.device and not weights[0].is_complex()
        is_usual = not group["capturable"] and not group["differentiable"] and "decoupled_weight_decay" in group
        has_rate = not isinstance(group["lr"], torch.Tensor)
        if not (is_plain and is_usual and has_rate and all(name in state for state in states for name in names)):
            return []
        averages, squares, steps = ([state[name] for state in states] for name in names[:3])
        largest = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []
        found.append(AdamLists(list(weights), averages, squares, largest, steps, [counted] * len(weights)))
    return found


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
