"""The seam between a training and a strategy: `Strategy.wrap` returns a DistributedModel, which does the rest.

A new strategy is one file with a class that has `wrap`, and one row in `evenstep.strategy_facts`. Most return a
subclass of DistributedModel that replaces `sync_gradients`, and `sync_replicas` where ranks keep their own buffers.

Below these: calling a loss on one replica, copies of a model, and a gradient's life without torch's Python around it.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from evenstep.distributed.world import World
from evenstep.private_apis import (
    autograd_engine,
    has_step_hooks,
    hooks_after_steps,
    hooks_before_steps,
    is_profiling,
    note_step_for_scheduler,
)
from evenstep.strategy_facts import STRATEGIES
from evenstep.task import Amount

if TYPE_CHECKING:
    from evenstep.distributed.gradient_tree import BackwardSums, GradientTree

T = TypeVar("T")


Sample = Callable[[nn.Module], object]
"""Computes with a model what a step computes, for a strategy that needs to observe it."""


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """What a plan asks of a strategy, for those that have a method `configure(settings)`."""

    half: torch.dtype | None = None
    """The type of mixed precision, over float32 weights."""
    cpu_offload: bool = False
    """Whether shards are kept in host memory, and updated there."""


class Strategy(Protocol):
    """How a model is distributed over a World."""

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        """The model on every device of this process; `sample` may be computed once, with a copy."""


@dataclass(frozen=True)
class RankStages:
    """The chunks of a model that one rank computes, and the whole model, which knows the shapes that they receive."""

    chunks: Sequence[Any]
    stage: Callable[..., Any]
    """(chunk, loss, batch, received) -> its output, or the loss."""
    whole: nn.Module
    blocks: list[str]


@runtime_checkable
class DividesModel(Protocol):
    """A strategy under which ranks compute one replica together."""

    def keep_part(self, model: nn.Module, world: World, rank: int, sample: Sample) -> RankStages | None:
        """Keep what one rank would have of a model, in a process that is alone, to see what it holds.

        `world` is that of this process, with the number of ranks. Returns the stages of the rank; None where it has
        slices of layers, which compute as if sums over ranks changed nothing: shapes are the same.
        """


def load_strategy(name: str, settings: StrategySettings | None = None) -> Strategy:
    """A strategy by its name; its file is imported when it is first used."""
    module, _, kind = STRATEGIES[name].location.partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), kind)()
    configure: Callable[[StrategySettings], None] | None = getattr(strategy, "configure", None)
    if configure is not None and settings is not None:
        configure(settings)
    return strategy


class LossModule(nn.Module):
    """Runs a function of the user's model as its own forward.

    The engine's wrappers (DDP, `fully_shard`) work by hooks around one forward. Wrapping the whole loss instead of
    the model means that no call of the user's can go around them: `model.encode(x)` is as good as `model(x)`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(self.model, *arguments)


class DistributedModel:
    """What `Team.wrap` returns: the user's model on the team's devices. This class is one replica in one process.

    `module` has the user's own parameter names; optimizers and checkpoints see it. `replicas` are called to compute:
    `replicas[i](work, *arguments)` runs `work(model, *arguments)` on the i-th device of this process.
    """

    is_wrapped: ClassVar[bool] = False
    """Whether a wrapper of torch's stands between a replica and its model."""
    meets_in_forward: ClassVar[bool] = False
    """Whether forward and backward are collectives, of which all ranks run as many."""

    def __init__(
        self, module: nn.Module, replicas: list[nn.Module], loss_modules: list[LossModule] | None = None
    ) -> None:
        self.module = module
        self.weights = list(module.parameters())
        """The parameters that an optimizer updates; found once, for walking the modules takes longer than a layer."""
        self.has_buffers = next(module.buffers(), None) is not None
        self.is_checked = False
        """Whether the team has seen that it can be trained."""
        self.notes: list[str] = []
        """What to log about how it is trained; the reader clears it."""
        self._has_noted_unused = False
        self.replicas = replicas
        self.loss_modules = loss_modules if loss_modules is not None else replicas
        self.weights_of = [list(bound.parameters()) for bound in self.loss_modules]
        """Those of each replica, which get its gradients."""
        self.separate = [SeparateGradients(weights) for weights in self.weights_of]
        """For each replica, to be called after its backward."""

    @cached_property
    def backward_sums(self) -> list[BackwardSums]:
        """For each replica, whether a backward may add to the gradients of the virtual replica before it."""
        from evenstep.distributed.gradient_tree import BackwardSums

        return [BackwardSums(weights) for weights in self.weights_of]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The output of the model on this process's first device, without gradients: `team.backward` computes those.

        Where parameters are sharded, all processes call it together.
        """
        self.refresh()
        with torch.no_grad():
            return self.loss_modules[0](lambda model: model(*arguments, **named))

    def refresh(self) -> None:
        """Give the first replica of this process the current weights, without waiting for another process."""

    def run(self, work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        """`work(*arguments[i])` for each replica of this process."""
        return one_after_another(work, arguments)

    def sync_replicas(self, is_training: bool) -> None:
        """Give every replica the current weights; before an evaluation also rank 0's buffers, which are those saved."""

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: gradients are sent in the last one of a step only."""
        return NOTHING if self._has_noted_unused or not is_last else self._noting_unused()

    def standing_in(self) -> AbstractContextManager[None]:
        """Around a backward whose gradients count for nothing."""
        return NOTHING

    needs_communication = False
    """Whether a step cannot be computed without what other ranks send, not even to measure what that costs."""
    schedule: Callable[[Any, Sequence[Any]], None] | None = None
    """What runs the micro-batches of a step, where they overlap; None: each is finished before the next one begins."""

    def sum_trees(self, trees: Sequence[GradientTree], virtual: tuple[range, ...]) -> None:
        """Give the weights the sum of what each replica of this process, and of others, computed.

        `virtual` are the virtual replicas of each.
        """
        from evenstep.distributed.gradient_tree import Layout, give, total

        (tree,) = trees
        give(self.weights, tree.sums[0] if len(tree.sums) == 1 else total(tree.sums, Layout.of(virtual)))
        if not self._has_noted_unused:
            self.note_unused()

    @contextmanager
    def _noting_unused(self) -> Iterator[None]:
        yield
        self.note_unused()

    def note_unused(self) -> None:
        """After the first backward, note which parameters have no gradient."""
        self._has_noted_unused = True
        if all(weight.grad is not None for weight in self.weights if weight.requires_grad):
            return
        from evenstep.strategies.unused_parameters import FREEZE, UnusedNote

        trained = {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}
        note = UnusedNote(list(trained), FREEZE)
        note.say(torch.tensor([float(weight.grad is not None) for weight in trained.values()]))
        self.notes += note.lines

    def follow_requires_grad(self) -> None:
        """Train what the parameters' requires_grad says now; all ranks call this after the same change."""

    def note_replay(self) -> None:
        """A step was replayed as a CUDA graph, around `sync_gradients`."""

    def time_communication(self) -> None:
        """From now on, announce also what a wrapper of torch's sends, and send nothing while communication is off."""

    def begin_round(self) -> None:
        """Before the first of several steps that each rank takes alone (`--link local`)."""

    def exchange_fragment(self, step: int) -> None:
        """After a step within a round: receive the fragment that is on its way, and send the next (streaming)."""

    def end_round(self, step: int, inner: Sequence[torch.Tensor]) -> None:
        """After the last of them: join what ranks found; `inner` is optimizer state, which becomes its mean."""

    def link_state(self) -> dict[str, torch.Tensor]:
        """What `--link` keeps between steps, by "parameter/kind", on rank 0; all ranks call this between two steps."""
        return {}

    def load_link_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue with what `link_state` returned, on any number of ranks."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that an optimizer updates."""
        return iter(self.weights)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, dropout and batch statistics are off; afterwards every layer is as the user had it."""
        with evaluating(self.module, *self.replicas):
            yield


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Inside, every layer is in eval mode; afterwards each is in its own mode again."""
    layers = [layer for module in modules for layer in module.modules()]
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


class Frozen:
    """Inside, these models get no gradients of their own, but let them through."""

    def __init__(self, models: Sequence[DistributedModel]) -> None:
        self._weights = [
            weight
            for model in models
            for replica in model.loss_modules
            for weight in replica.parameters()
            if weight.requires_grad
        ]

    def __enter__(self) -> None:
        for weight in self._weights:
            weight.requires_grad_(False)

    def __exit__(self, *error: object) -> None:
        for weight in self._weights:
            weight.requires_grad_(True)


def call(models: tuple[DistributedModel, ...], replica: int, loss: Callable[..., Amount], data: Any) -> Amount:
    """`loss` of the models on one replica: the trained one through torch's wrapper, the others directly."""
    trained, *others = models
    if not others:
        return trained.replicas[replica](loss, data)  # type: ignore[no-any-return]

    def inner(*bare: Any) -> Amount:
        return loss(bare, data)

    for other in reversed(others):
        inner = _inside(other.loss_modules[replica], inner)
    return trained.replicas[replica](inner)  # type: ignore[no-any-return]


def _inside(bound: nn.Module, inner: Callable[..., Amount]) -> Callable[..., Amount]:
    return lambda *bare: bound(lambda model: inner(*bare, model))


def one_after_another(work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    """`work` for one replica after the other, in this thread."""
    return [work(*replica_arguments) for replica_arguments in arguments]


NOTHING: AbstractContextManager[None] = nullcontext()
"""Around what needs nothing around it; made once, for a step enters several."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, `device` is current in this thread: CUDA keeps that per thread."""
    # By its index, which torch looks up several calls deep otherwise.
    return torch.cuda.device(device.index) if device.type == "cuda" else NOTHING


SMALL_ENOUGH = 20_000_000
"""Parameters up to which something is tried on a copy of a model."""

M = TypeVar("M", bound=nn.Module)


def copied(model: M, memo: dict[int, Any] | None = None) -> M:
    """A deep copy, in which whatever `memo` names by its id is taken as already copied.

    A layer may keep a tensor that it computes from its parameters before each forward, as the older
    `torch.nn.utils.weight_norm` does. torch refuses to copy such a tensor; here its values are.
    """
    computed = [
        value
        for layer in model.modules()
        for value in vars(layer).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    return copy.deepcopy(model, {**{id(one): one.detach().clone() for one in computed}, **(memo or {})})


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same values, NaN included."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def go_back(loss: torch.Tensor, weight: float, keeps_graph: bool = False) -> None:
    """`(loss * weight).backward()`: the weight is where the engine starts, and no operation of the graph.

    `Tensor.backward` makes and checks a tensor of ones at every call: a tenth of a small step.
    """
    if type(loss) is not torch.Tensor:
        (loss * weight).backward(retain_graph=keeps_graph)
        return
    start = _start(weight, loss.dtype, loss.device)
    autograd_engine.run_backward(
        (loss,), (start,), keeps_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


# Never dropped: a captured CUDA graph reads it in every replay.
@cache
def _start(weight: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), weight, dtype=dtype, device=device)


def separate(weights: Sequence[torch.Tensor]) -> bool:
    """Give gradients that share memory a memory each; returns whether some did.

    Backward of `a.view(...) + b.view(...)` hands both the same numbers, and torch keeps them as two gradients. Whatever
    changes gradients in place changes these twice: the next micro-batch, an average, clipping.
    """
    ranges = sorted(
        [
            (gradient.data_ptr(), gradient.nbytes, index)
            for index, weight in enumerate(weights)
            if type(gradient := weight.grad) is torch.Tensor and gradient.layout is torch.strided
        ]
    )
    end, found = 0, False
    for start, num_bytes, index in ranges:
        if start < end:
            gradient = weights[index].grad
            assert gradient is not None
            weights[index].grad = gradient.clone()
            found = True
        end = max(end, start + num_bytes)
    return found


class SeparateGradients:
    """`separate` for the weights of one replica, which looks closely only where gradients may share memory.

    Mostly the allocator gives the gradients of every step the same memory; those of virtual replicas take turns.
    """

    MOST_KNOWN = 32

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = weights
        self._are_plain = all(map(_has_plain_gradient, weights))
        self._sizes = [weight.nbytes for weight in weights] if self._are_plain else []
        self._known: set[tuple[int, ...]] = set()
        """Where gradients lay that share no memory."""

    def __call__(self) -> list[torch.Tensor | None] | None:
        """The gradients, each with memory of its own; None where one is not plain."""
        gradients = [weight.grad for weight in self.weights]
        try:
            where = tuple([0 if one is None else one.data_ptr() for one in gradients]) if self._are_plain else None
        except RuntimeError:  # a sparse one has no address
            where = None
        if where in self._known:
            return gradients
        if where is None or not _are_apart(where, self._sizes):
            separate(self.weights)
            return None
        if len(self._known) == self.MOST_KNOWN:
            self._known.clear()
        self._known.add(where)
        return gradients


def _has_plain_gradient(weight: torch.Tensor) -> bool:
    """Whether its gradients are of its own type, and so of its size."""
    return type(weight) in (torch.Tensor, nn.Parameter) and getattr(weight, "grad_dtype", None) in (None, weight.dtype)


def _are_apart(where: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether gradients at these addresses, of these sizes at most, share no memory; 0 is no gradient."""
    end = 0
    for start, num_bytes in sorted(zip(where, sizes, strict=True)):
        if start:
            if start < end:
                return False
            end = start + num_bytes
    return True


def fills_memory(weight: torch.Tensor) -> bool:
    """Whether its numbers lie together without gaps, in whatever order; its gradients then lie in the same one."""
    last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    return last + 1 == weight.numel()


def update(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, less the profiler's range and the compiler's marks around it: a twentieth of a small step.

    With hooks, under a profiler, and for any step that is not torch's own, it is the whole call.
    """
    step, bare = _steps_of(optimizer)
    if bare is None or _has_listeners(optimizer):
        optimizer.step()
        return
    note_step_for_scheduler(optimizer, step)
    with torch.no_grad():
        bare(optimizer)


def is_bare(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `update` takes nothing but the step that torch has for it."""
    return has_torch_step(optimizer) and not _has_listeners(optimizer)


def has_torch_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is torch's own, which a scheduler may have wrapped, and no other library."""
    return _steps_of(optimizer)[1] is not None


def _steps_of(optimizer: torch.optim.Optimizer) -> tuple[Any, Callable[[torch.optim.Optimizer], Any] | None]:
    """Its step, and that without what torch wraps around it."""
    step: Any = getattr(optimizer, "__dict__", {}).get("step", type(optimizer).step)
    # Bound to the optimizer, or to another one; a scheduler wraps it, to know that there was a step.
    is_own = getattr(step, "__self__", optimizer) is optimizer
    return step, _bare_step(getattr(step, "__func__", step)) if is_own else None


def _has_listeners(optimizer: torch.optim.Optimizer) -> bool:
    """Hooks, torch's profiler, or autograd, if the step is differentiable."""
    return bool(
        has_step_hooks(optimizer)
        or hooks_before_steps
        or hooks_after_steps
        or is_profiling()
        or optimizer.defaults.get("differentiable")
    )


@cache
def _bare_step(step: Any) -> Callable[[torch.optim.Optimizer], Any] | None:
    """A step of torch's own without what torch wraps around it; None if another library wraps it."""
    layers = [step]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    modules = [getattr(layer, "__globals__", {}).get("__name__", "") for layer in layers]
    return layers[-1] if all(name.startswith("torch.optim.") for name in modules) else None


def forget(weights: Iterable[torch.Tensor]) -> None:
    """Drop their gradients."""
    for weight in weights:
        weight.grad = None


def forget_gradients(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.zero_grad()`, less the profiler's range around it; a zero_grad of the user's own is called."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        forget(group["params"])


def has_sparse_gradients(model: nn.Module) -> bool:
    """Whether a layer makes them (sparse=True)."""
    return any(getattr(layer, "sparse", False) is True for layer in model.modules())
