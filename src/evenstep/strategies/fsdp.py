"""One process per device; each holds a shard of every parameter, gradient and optimizer state.

With `--mesh data=2,fsdp=4` the shards of a copy of the model are those of 4 ranks, and gradients are averaged over the
copies after they are scattered (HSDP).

`units_apart` chooses the parts of a model that are gathered separately: those whose parameters nothing else uses.

`Agreement` checks before each collective that all ranks run the same layers and get the same gradients. A layer or a
head that some ranks do not use makes their collectives differ. torch has no hook for
this: it wraps `FSDPParamGroup.post_backward`, which is private, as torch 2.11 and 2.13 have it. Between machines each
comparison is a round trip, so only the first forwards are compared, and then one of many, each with its backward. Ranks
that begin to differ in between end as torch ends them: in its error, or at a timeout.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from evenstep.distributed.collective_check import Ledger, open_ledger
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.private_apis import (
    DefaultAllGather,
    DefaultReduceScatter,
    fsdp_groups,
    give_gradient,
    has_gradient,
    tree_leaves,
    unsharded_parameters,
    widen_gradients,
)
from evenstep.strategies.base import (
    SMALL_ENOUGH,
    DistributedModel,
    LossModule,
    Sample,
    StrategySettings,
    copied,
    fills_memory,
    has_sparse_gradients,
    same_numbers,
    separate,
)
from evenstep.strategies.ddp import send_buffers, send_from_rank_0
from evenstep.strategies.fsdp_precision import policy
from evenstep.strategies.fsdp_scalars import shard
from evenstep.strategies.model_units import units
from evenstep.strategies.single import Single
from evenstep.strategies.unused_parameters import UnusedParameters, negative_zeros

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def units_apart(model: nn.Module, world: World, sample: Sample | None) -> list[nn.Module]:
    """The units whose parameters nothing else uses, as far as a sample shows; all ranks call this.

    Outside of its own forward, a unit has this rank's slices of its parameters. An average of weights that the model
    keeps in a buffer, a penalty on all weights, a method other than forward: these need the parameters whole. The
    units of a large model are taken as they are.
    """
    found = units(model)
    if sample is None or not _is_small(model):
        return found
    used, conditional, written = zip(*world.gather(_observed(model, sample)), strict=True)
    changed = next(filter(None, written), None)
    if changed:
        raise TaskError(
            f"forward changes the parameter {changed[0]}; under fsdp it has a gathered copy, which is dropped "
            "afterwards.\nKeep what forward changes in a buffer (register_buffer), or use ddp"
        )
    together = {index for of_rank in (*used, *conditional) for index in of_rank}
    return [unit for index, unit in enumerate(found) if index not in together]


def _is_small(model: nn.Module) -> bool:
    """Whether something may be tried on a copy of it."""
    return sum(weight.numel() for weight in model.parameters()) <= SMALL_ENOUGH


ALIGNMENT = 64


class Arrivals:
    """Rank 0's values of a model on all ranks, unit by unit, before each is sharded.

    On other ranks than 0, a large model has no values yet, and no memory of its own (`training.file_backed_init`).
    There the units follow each other in one buffer: freed one by one between shards that stay, they would leave gaps.
    """

    def __init__(self, model: nn.Module, found: Sequence[nn.Module], world: World) -> None:
        self._world = world
        sizes = [sum(map(_aligned_bytes, unit.parameters())) for unit in found]
        rest = sum(map(_aligned_bytes, model.parameters())) - sum(sizes)
        size = 0 if world.is_main else max([*sizes, rest])
        self._buffer = torch.empty(size, dtype=torch.uint8, device=world.device)

    @torch.no_grad()
    def bring(self, module: nn.Module) -> None:
        """Give all ranks the values of what is not sharded yet; on their devices."""
        from torch.distributed.tensor import DTensor

        start = 0
        weights = [one for one in module.parameters() if not isinstance(one, DTensor)]
        for weight in weights:
            weight.data = weight.data.to(self._world.device) if self._world.is_main else self._place(weight, start)
            start += _aligned_bytes(weight)
        buffers = list(module.buffers())
        for buffer in buffers:
            # These stay, on every rank.
            own = buffer.data.to(self._world.device)
            buffer.data = own if self._world.is_main else torch.empty_like(own)
        send_from_rank_0([tensor.data for tensor in (*weights, *buffers)])

    def _place(self, weight: torch.Tensor, start: int) -> torch.Tensor:
        if not fills_memory(weight):
            return torch.empty_like(weight, device=self._world.device)
        there = self._buffer[start : start + weight.nbytes].view(weight.dtype)
        return there.as_strided(weight.shape, weight.stride(), there.storage_offset())


def _aligned_bytes(weight: torch.Tensor) -> int:
    return -(-weight.nbytes // ALIGNMENT) * ALIGNMENT


def _observed(model: nn.Module, sample: Sample) -> tuple[list[int], list[int], list[str]]:
    """The units that a sample used from outside, those that another one may not run, and the parameters it changed."""
    copy = copied(model)
    watched = UsesOutside(units(copy))
    with watched:
        sample(copy)
    pairs = zip(model.named_parameters(), copy.parameters(), strict=True)
    changed = [name for (name, before), after in pairs if not same_numbers(before, after)]
    return sorted(watched.seen), watched.conditional(), changed


DECISIONS = {
    *("__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy", "is_nonzero"),
    *("equal", "allclose", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"),
}
"""Functions of tensors whose results Python may branch on, or whose shapes depend on values."""


class UsesOutside(TorchFunctionMode):
    """Inside, notes which units' parameters are computed with while the unit itself is not running.

    And which units run after a decision that depends on data or on chance, outside of all units: a sample of
    another rank may be decided differently, and that rank would not gather the unit.
    """

    def __init__(self, watched: Sequence[nn.Module]) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self._num_units = len(watched)
        self._running: Counter[int] = Counter()
        self._run: set[int] = set()
        self._decided: set[int] = set()
        self._is_decided = False
        self._draws = _host_draws()
        self._unit_of = {id(weight): index for index, unit in enumerate(watched) for weight in unit.parameters()}
        for index, unit in enumerate(watched):
            unit.register_forward_pre_hook(lambda *_, index=index: self._enter(index))
            unit.register_forward_hook(lambda *_, index=index: self._running.subtract([index]), always_call=True)

    def conditional(self) -> list[int]:
        """The units that ran after a decision, and those that did not run."""
        return sorted(self._decided | (set(range(self._num_units)) - self._run))

    def _enter(self, index: int) -> None:
        self._running.update([index])
        self._run.add(index)
        if self._is_decided or self._draws != _host_draws():
            self._is_decided = True
            self._decided.add(index)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        used = {self._unit_of[id(one)] for one in tree_leaves((args, kwargs)) if id(one) in self._unit_of}
        outside = {index for index in used if not self._running[index]}
        # A shape or a device is the same for a slice.
        if outside and any(isinstance(one, torch.Tensor) for one in tree_leaves(result)):
            self.seen |= outside
        if not self._is_decided and _decides(func, args) and not any(self._running.values()):
            self._is_decided = True
        return result


def _decides(func: Any, args: tuple[Any, ...]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__getitem__":
        return any(isinstance(one, torch.Tensor) and one.dtype is torch.bool for one in tree_leaves(args[1:]))
    return name in DECISIONS or (name == "where" and len(args) == 1)


def _host_draws() -> tuple[Any, ...]:
    """The state of Python's and NumPy's generators."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["pos"], state["state"]["key"].tobytes()


KINDS = 2**32
NUM_FIRST = 16
"""Forwards that are compared at the start of a run, where comparing is slow; most differences show early."""
EVERY = 256
"""Of later forwards, one in this many is compared."""


class Event(IntEnum):
    """What a rank is about to do, or lacks."""

    GATHER = 1
    """The parameters of a unit are gathered, for its forward or its backward."""
    END = 2
    """The forward is over."""
    REDUCE = 3
    """The gradients of a unit are averaged."""


class Agreement:
    """Of all models of one process: each event is compared with the other ranks' before it happens."""

    def __init__(self, ledger: Ledger, world: World) -> None:
        self._ledger, self._world = ledger, world
        self._units: list[tuple[str, list[str]]] = []
        """The name of each unit, and those of its parameters."""
        self._num_forwards = 0

    def gathers(self, name: str, parameters: list[str]) -> Callable[[], None]:
        """To be called before the parameters of this unit are gathered."""
        self._units.append((name, parameters))
        index = len(self._units) - 1
        return lambda: self._compare(Event.GATHER, index)

    def watch_forward(self, root: nn.Module) -> None:
        """A rank that runs fewer layers enters another collective than the other ranks."""
        # The compiler would trace what it cannot repeat.
        root.register_forward_hook(torch.compiler.disable(lambda *_: self._compare(Event.END, 0)))

    def watch_backward(self, group: Any, fill: Callable[[], None]) -> None:
        """Call `fill` before the gradients of a unit are averaged, and compare which unit that is."""
        unit = len(self._units) - 1
        post_backward = group.post_backward

        def compared(*unused: Any) -> None:
            if group.reduce_grads:
                fill()
                widen_gradients(group)
                if any(map(has_gradient, group.fsdp_params)):
                    self._compare(Event.REDUCE, unit)
            post_backward(*unused)

        group.post_backward = compared

    def _compare(self, event: Event, index: int) -> None:
        if self._world.communication.is_off or not self._is_due(event):
            return
        other = self._ledger.differing(event * KINDS + index)
        if other is None:
            return
        theirs = self._words(Event(other.entry // KINDS), other.entry % KINDS)
        raise TaskError(
            f"fsdp gathers these layers one by one, and so all ranks run the same ones in every step: rank "
            f"{self._world.rank} {self._words(event, index)}, rank {other.rank} {theirs}.\nUse them on every rank "
            "(adding 0 * layer(x).sum() to the loss is enough), or use ddp, where ranks may differ in this"
        )

    def _is_due(self, event: Event) -> bool:
        """The same on all ranks: a layer or a gradient that one of them lacks changes no number of forwards."""
        number = self._num_forwards
        self._num_forwards += event is Event.END
        return not self._ledger.waits or number < NUM_FIRST or number % EVERY == 0

    def _words(self, event: Event, index: int) -> str:
        if event is Event.END:
            return "runs no more layers"
        name, parameters = self._units[index]
        shown = ", ".join(parameters[:4]) + " ..." * (len(parameters) > 4)
        return f"runs {name or 'the model'} ({shown})" if event is Event.GATHER else f"has gradients for {shown}"


COST = (
    "fsdp averages zeros for them, and between machines sends in each step one small message about which they are; "
    "freeze what is never trained: parameter.requires_grad_(False)"
)


class Unreached:
    """Surrounds the last backward of a step, in which units average zeros for parameters that this rank did not use."""

    def __init__(self, model: nn.Module, world: World) -> None:
        names, self._weights = zip(*model.named_parameters(), strict=True)
        self.unused = UnusedParameters(names, world, COST, sees_sums=False)
        self._index_of = {name: index for index, name in enumerate(names)}
        self._filled: list[int] = []
        self.then: Callable[[], None] = lambda: None
        """Called when all ranks have their shards of the gradients."""

    def filling(self, names: list[str], group: Any, is_root: bool) -> Callable[[], None]:
        """Gives zeros to a unit's parameters that have no gradient, if others of the unit have one.

        Units none of whose parameters have one are not averaged; the root, which all ranks run, always is.
        """
        indices = [self._index_of[name] for name in names]

        def fill() -> None:
            without = [number for number, one in enumerate(group.fsdp_params) if not has_gradient(one)]
            if not without or (len(without) == len(indices) and not is_root):
                return
            for number in without:
                one = group.fsdp_params[number]
                if one.sharded_param.requires_grad and give_gradient(one, negative_zeros):
                    self._filled.append(indices[number])

        return fill

    def __enter__(self) -> None:
        self._filled.clear()

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        if error is not None:
            return
        without = [index for index, one in enumerate(self._weights) if one.requires_grad and one.grad is None]
        for index in self.unused.nowhere(self._filled + without):
            self._weights[index].grad = None
        self.then()


class FSDP(Single):
    """torch's `fully_shard`: every child of a ModuleList or Sequential is gathered on its own, then the rest."""

    wraps_alone: ClassVar[bool] = False
    """Whether one process shards too: for tests and benchmarks on a machine with one GPU."""

    def __init__(self) -> None:
        self._agreement: Agreement | None = None
        """One for all models: the collectives of several follow each other in one order."""
        self._settings = StrategySettings()
        self._meshes: tuple[DeviceMesh, DeviceMesh | None] | None = None
        """The same for all models: the axes of a mesh have process groups of their own."""

    def configure(self, settings: StrategySettings) -> None:
        """Called before the first `wrap`."""
        self._settings = settings

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        if world.size == 1 and not self.wraps_alone and not self._settings.cpu_offload:
            # One process has nothing to shard over, and gathering its own slices would triple a small step.
            return super().wrap(model, world)
        refuse_unshardable(model)
        if _is_small(model):
            model.to(world.device)
        found = units_apart(model, world, sample)
        return self.shard_units(model, world, found, Arrivals(model, found, world).bring)

    def shard_units(
        self, model: nn.Module, world: World, found: Sequence[nn.Module], bring: Callable[[nn.Module], None]
    ) -> ShardedModel:
        """Shard these units, and then the rest; `bring` gives all ranks the values of what is sharded next."""
        mesh, copies = self._meshes = self._meshes or _meshes(world)
        dtype = self._gather_dtype(world)
        for unit in found:
            # One after the other: of a model that is larger than a device, no more than a unit is whole there.
            bring(unit)
            shard(unit, mesh=mesh, **self._placed(), **policy(unit, dtype))
        bound = LossModule(model)
        bring(bound)
        shard(bound, mesh=mesh, **self._placed(), **policy(bound, dtype))
        unreached = Unreached(model, world)
        self._watch(bound, world, unreached)
        if copies is not None:
            for _, unit, _ in fsdp_groups(bound):
                unit.set_all_reduce_hook(AverageOfCopies(world, copies.get_group()))
        if world.num_virtual is not None:
            from evenstep.strategies.fsdp_virtual_replicas import TreeShardedModel

            return TreeShardedModel(model, bound, world, unreached)
        return ShardedModel(model, bound, world, unreached)

    def _gather_dtype(self, world: World) -> torch.dtype | None:
        """What parameters are gathered in, if not in their own type.

        float16 has a range that weights may leave; virtual replicas promise the bits of one device.
        """
        return self._settings.half if self._settings.half is torch.bfloat16 and world.num_virtual is None else None

    def _placed(self) -> dict[str, Any]:
        """Arguments of `fully_shard` for where shards are kept."""
        if not self._settings.cpu_offload:
            return {}
        from torch.distributed.fsdp import CPUOffloadPolicy

        return {"offload_policy": CPUOffloadPolicy()}

    def _watch(self, bound: LossModule, world: World, unreached: Unreached) -> None:
        """Compare what ranks are about to send, and announce it."""
        if self._agreement is None:
            self._agreement = Agreement(open_ledger(world.gather, world.rank), world)
        agreement = self._agreement
        names = {id(weight): name for name, weight in bound.model.named_parameters()}
        for name, unit, group in fsdp_groups(bound):
            own = [names[id(one.sharded_param)] for one in group.fsdp_params]
            unit.set_custom_all_gather(TimedAllGather(world, agreement.gathers(name.removeprefix("model."), own)))
            unit.set_custom_reduce_scatter(TimedReduceScatter(world))
            agreement.watch_backward(group, unreached.filling(own, group, is_root=not name))
        agreement.watch_forward(bound)


def _meshes(world: World) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The ranks that hold shards of what this one has a shard of; and those with the same shard of other copies."""
    # Imported here: it brings sympy along, two seconds that the other strategies need not wait for.
    from torch.distributed.device_mesh import init_device_mesh

    num, part = world.num_shards or world.size, world.ranks_per_replica
    if num == world.size:
        return init_device_mesh(world.device.type, (world.size,)), None
    sizes = world.size // num // part, num, part
    every = init_device_mesh(world.device.type, sizes, mesh_dim_names=("data", "fsdp", "model"))
    return every["fsdp"], every["data"] if sizes[0] > 1 else None


class ShardedModel(DistributedModel):
    """A shard of every parameter on each rank; `fully_shard` gathers and reduces inside forward and backward."""

    is_wrapped: ClassVar[bool] = True

    def __init__(self, model: nn.Module, bound: LossModule, world: World, unreached: Unreached) -> None:
        super().__init__(model, [bound])
        self._world = world
        self._unreached = unreached
        self.notes = unreached.unused.note.lines
        self._root: Any = bound
        self._reduces_gradients = True
        """What `fully_shard` was last set to do; this is its default."""

    def after_gradients(self, then: Callable[[], None]) -> None:
        """Call this in every step, between the last backward and the update."""
        self._unreached.then = then

    def sync_replicas(self, is_training: bool) -> None:
        # At every step too: DDP does so, and the strategies are to agree.
        send_buffers(self, self._world if is_training else None)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with super().evaluating():
            yield
        # A forward without backward leaves the root's parameters gathered: the next one would not see new weights.
        self._root.reshard()

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        if self._reduces_gradients != is_last:
            # It walks through all modules.
            self._root.set_requires_gradient_sync(is_last)
            self._reduces_gradients = is_last
        return self._unreached if is_last else _separating(self._root)


def refuse_unshardable(model: nn.Module) -> None:
    """Raise TaskError for sparse gradients and complex parameters."""
    layers = [name for name, layer in model.named_modules() if has_sparse_gradients(layer)]
    if layers:
        raise TaskError(
            f"{layers[-1] or 'the model'} makes sparse gradients (sparse=True), and fsdp shards dense ones;\n"
            "leave sparse out, or use ddp"
        )
    # torch's optimizers leave complex parameters as they are where they are sharded, without a word.
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight.is_complex():
            raise TaskError(
                f"the parameter {name} is {str(weight.dtype).removeprefix('torch.')}, and fsdp trains real ones only;\n"
                "keep it as a real parameter and use torch.view_as_complex in forward, or use ddp"
            )


@contextmanager
def _separating(root: nn.Module) -> Iterator[None]:
    """Around a backward whose gradients stay whole and are added to later, on parameters that torch alone sees."""
    yield
    separate([weight for _, _, group in fsdp_groups(root) for weight in unsharded_parameters(group)])


class TimedAllGather(DefaultAllGather):
    """torch's own, announced; `before` is called first."""

    def __init__(self, world: World, before: Callable[[], None]) -> None:
        self._world, self._before = world, before

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
        if self._world.communication.is_off:
            # Numbers that are there, of the right size: what was never written may be NaN.
            own = input_tensor.flatten().clone()
            output_tensor.view(-1, own.numel()).copy_(own)
            return None
        self._before()
        arrived = self._world.spans.send("all-gather", [input_tensor], waits=True)
        work = super().__call__(output_tensor, input_tensor, *more, **named)
        arrived()
        return work


class TimedReduceScatter(DefaultReduceScatter):
    """torch's own, announced."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *more: Any, **named: Any
    ) -> Any:
        if self._world.communication.is_off:
            own = input_tensor.view(-1, output_tensor.numel())[dist.get_rank(group)]
            output_tensor.copy_(own.view_as(output_tensor))
            return None
        arrived = self._world.spans.send("reduce-scatter", [input_tensor], waits=True)
        work = super().__call__(output_tensor, input_tensor, group, *more, **named)
        arrived()
        return work


class AverageOfCopies:
    """An all-reduce hook: after a unit's gradients are scattered, averages them over the copies of the model.

    torch's own, with a mesh of two axes, cannot be timed, or left out while communication is off.
    """

    def __init__(self, world: World, group: Any) -> None:
        self._world, self._group = world, group

    def __call__(self, gradients: torch.Tensor) -> None:
        if self._world.communication.is_off:
            return
        if gradients.is_cuda:
            # Allocated in the stream of the reduce-scatter, where the next one may take its memory.
            gradients.record_stream(torch.cuda.current_stream())
        arrived = self._world.spans.send("all-reduce", [gradients], waits=True)
        dist.all_reduce(gradients, group=self._group)
        gradients /= self._group.size()
        arrived()
