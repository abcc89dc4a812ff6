"""One process per device; each holds the whole model, and gradients are averaged during backward or after it.

Across GPUs and machines torch's DistributedDataParallel does that. On one machine's CPU, gradients are averaged through
shared memory after backward: DDP's buckets would copy every gradient once more, and there is nothing to overlap with,
since the cores that sum are those that compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from evenstep.distributed.devices import leave_default_stream
from evenstep.distributed.machines import Machines, MachineSum, Message
from evenstep.distributed.shm.allreduce import DTYPES, open_channel
from evenstep.distributed.shm.native import load
from evenstep.distributed.world import World
from evenstep.errors import TaskError, TrainingError
from evenstep.link_method import LinkMethod, parse_link
from evenstep.private_apis import (
    broadcast_coalesced,
    is_traceable_wrapper_subclass,
    refuse_different_shapes,
    take_over,
    unreduced,
)
from evenstep.strategies.base import NOTHING, DistributedModel, LossModule, Sample, fills_memory, has_sparse_gradients
from evenstep.strategies.single import Single
from evenstep.strategies.unused_parameters import UnusedNote, UnusedParameters, negative_zeros

if TYPE_CHECKING:
    from evenstep.strategies.compression import Compression

AVERAGED_COST = (
    "ddp averages zeros for them, and lists them in the same message; "
    "freeze what is never trained: parameter.requires_grad_(False)"
)


class Averages(Protocol):
    """What averages tensors over ranks."""

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """In place; all tensors have one type."""


class Averaging:
    """Surrounds the last backward of a step."""

    def __init__(
        self,
        channel: Averages,
        model: nn.Module,
        world: World,
        own: Sequence[tuple[str, nn.Parameter]] | None = None,
    ) -> None:
        self._channel, self._world = channel, world
        self._is_broken = False
        self._names, self._weights = zip(*(trained(model) if own is None else own), strict=True)
        self._is_plain = [weight.is_contiguous() for weight in self._weights]
        self._dtypes = [weight.dtype for weight in self._weights]
        self._kinds = [[i for i, one in enumerate(self._dtypes) if one == kind] for kind in dict.fromkeys(self._dtypes)]
        """The indices of weights, by type: a channel averages those of one type at a time."""
        self.note = UnusedNote(self._names, AVERAGED_COST)
        self._is_listed = False
        """Whether some rank once lacked a gradient; from then on, ranks list those that they have."""
        self._flags = torch.zeros(1, dtype=self._dtypes[0])
        """Averaged with the gradients: how many a rank lacks, or for each whether it has one."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        if error is None and not self._world.communication.is_off:
            self._average()

    def _average(self) -> None:
        gradients = [weight.grad for weight in self._weights]
        self._set_flags([index for index, gradient in enumerate(gradients) if gradient is None])
        rows = [
            gradient
            if is_plain and gradient is not None and gradient.dtype is dtype and gradient.is_contiguous()
            else self._as_row(index)
            for index, (gradient, is_plain, dtype) in enumerate(
                zip(gradients, self._is_plain, self._dtypes, strict=True)
            )
        ]
        spans = self._world.spans
        spans.part("reduce")
        arrived = spans.send("gradients", rows)
        if self._is_broken:
            raise TrainingError("averaging gradients was interrupted and cannot continue; start the run again")
        self._is_broken = True
        flags = [self._flags]
        for indices in self._kinds:
            self._channel.average([*(rows[index] for index in indices), *flags])
            flags = []
        if self._is_listed or self._flags.item():
            self._drop_unused(gradients)
        self._is_broken = False
        arrived()
        spans.part("backward")

    def _set_flags(self, lacking: list[int]) -> None:
        if self._is_listed:
            self._flags.fill_(1)
            self._flags[lacking] = 0
        elif lacking:
            self._flags.fill_(len(lacking))

    def _drop_unused(self, own: list[torch.Tensor | None]) -> None:
        """Leave no gradient where no rank had one; `own` are this rank's, before the average."""
        if not self._is_listed:
            self._is_listed = True
            self._flags = torch.zeros(len(own), dtype=self._dtypes[0])
            self._set_flags([index for index, gradient in enumerate(own) if gradient is None])
            self._channel.average([self._flags])
            self.note.say(self._flags)
        for index in torch.nonzero(self._flags == 0).flatten().tolist():
            self._weights[index].grad = None

    def _as_row(self, index: int) -> torch.Tensor:
        """A gradient that does not lie in memory in the order in which its numbers are counted; its weight may not."""
        weight: nn.Parameter = self._weights[index]
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if weight.grad.dtype is not weight.dtype:
            raise TaskError(
                f"the gradient of {self._names[index]} is {weight.grad.dtype} and its weight {weight.dtype}; ddp "
                "averages gradients of their weights' type: leave grad_dtype as it is"
            )
        if weight.grad.stride() != weight.stride():
            weight.grad = torch.empty_like(weight).copy_(weight.grad)
        return weight.grad.as_strided((weight.numel(),), (1,))


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that get gradients, and their names."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def can_average(model: nn.Module) -> bool:
    """Whether a channel takes all of its gradients."""
    return not has_sparse_gradients(model) and all(_fits(weight) for _, weight in trained(model))


def _fits(weight: nn.Parameter) -> bool:
    """Whether it is numbers that fill their memory without gaps, in whatever order; its gradients use the same one."""
    if is_lazy(weight) or is_traceable_wrapper_subclass(weight) or weight.dtype not in DTYPES:
        return False
    return weight.numel() == 0 or fills_memory(weight)


SEND_BYTES = 2**28


class DDP(Single):
    """torch's DistributedDataParallel around the whole loss; on one machine's CPU, shared memory and no wrapper."""

    wraps_alone: ClassVar[bool] = False
    """One process has nothing to average, and DDP's buckets would cost it a copy of every gradient."""

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        if world.size == 1 and not self.wraps_alone:
            return super().wrap(model, world)
        model.to(world.device)
        leave_default_stream(world.device)
        if not trained(model):
            # DDP refuses a model with nothing to train; such a one is used beside another that trains.
            return RankModel(model, [LossModule(model)])
        if world.num_virtual is not None:
            from evenstep.strategies.ddp_virtual_replicas import SummedModel

            return SummedModel(model, world)
        return _linked(model, world, world.communication.link)


class RankModel(DistributedModel):
    """A whole model in each of several processes, each with buffers of its own."""

    def sync_replicas(self, is_training: bool) -> None:
        if not is_training:
            send_buffers(self)

    def follow_requires_grad(self) -> None:
        raise TaskError(
            "no parameter required a gradient when the model was wrapped, and now some do; wrap it with those to be "
            "trained first, and freeze them afterwards"
        )


class AveragedModel(DistributedModel):
    """Gradients are averaged through shared memory after backward; buffers are sent at every step, as DDP does."""

    def __init__(self, model: nn.Module, averaging: Averaging, world: World) -> None:
        # As DDP does.
        send_from_rank_0([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])
        super().__init__(model, [LossModule(model)])
        self._averaging, self._world = averaging, world
        self.notes = averaging.note.lines

    def sync_replicas(self, is_training: bool) -> None:
        if not is_training:
            send_buffers(self)
        elif self.has_buffers:
            send_buffers(self, self._world)

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        return self._averaging if is_last else NOTHING

    def follow_requires_grad(self) -> None:
        averaging = _averaging(self.module, self._world)
        if averaging is None:
            raise TaskError("ddp cannot average the gradients of the parameters that require them now")
        self._averaging, self.notes = averaging, averaging.note.lines


class Completing:
    """Surrounds the last backward of a step, after which DDP waits for the gradients that backward did not reach."""

    def __init__(self, wrapper: DistributedDataParallel, model: nn.Module, world: World) -> None:
        self._wrapper = wrapper
        self._weights = [weight for _, weight in trained(model)]
        self._sparse = _sparse_parameters(model)
        self.unused = UnusedParameters([name for name, _ in trained(model)], world, COMPLETED_COST)

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        if error is None:
            self._complete()

    def _complete(self) -> None:
        """Give DDP zeros in their place: then it sends what other ranks wait for, and nobody hangs."""
        lacking: list[int] = []
        unreduced_ = unreduced(self._wrapper)
        if unreduced_:
            lacking = [index for index in unreduced_ if self._weights[index].grad is None]
            # Their hooks tell DDP; a gradient of an earlier micro-batch stays as it is.
            missed = [self._weights[index] for index in unreduced_]
            torch.autograd.backward(missed, [self._zeros(weight) for weight in missed])
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            if unreduced_:
                # Not before DDP has all gradients of this backward: it would refuse the next one.
                raise RuntimeError("some parameters have no gradient, which ranks compare in each step")
            return
        for index in self.unused.nowhere(lacking, [self._reduced(index) for index in lacking]):
            self._weights[index].grad = None

    def _zeros(self, weight: torch.Tensor) -> torch.Tensor:
        if id(weight) not in self._sparse:
            return negative_zeros(weight)
        # No rows, as an embedding that was given none makes.
        rows = torch.zeros(1, 0, dtype=torch.int64, device=weight.device)
        values = weight.new_zeros(0, *weight.shape[1:])
        return torch.sparse_coo_tensor(rows, values, weight.shape, check_invariants=True)

    def _reduced(self, index: int) -> torch.Tensor:
        gradient = self._weights[index].grad
        assert gradient is not None
        # Of a sparse one no number is left if no rank has any.
        return gradient.coalesce().values() if gradient.is_sparse else gradient


def _sparse_parameters(model: nn.Module) -> set[int]:
    layers = [layer for layer in model.modules() if has_sparse_gradients(layer)]
    return {id(weight) for layer in layers for weight in layer.parameters(recurse=False)}


COMPLETED_COST = (
    "After backward, ddp sends zeros for them, and between machines one small message about which they are; "
    "freeze what is never trained: parameter.requires_grad_(False)"
)


class DDPModel(RankModel):
    """The loss inside torch's DistributedDataParallel, which sends buckets of gradients while backward runs."""

    is_wrapped: ClassVar[bool] = True

    def __init__(self, model: nn.Module, world: World, sending: Sending | None = None) -> None:
        """`sending` is how gradients reach the other ranks, if not as torch does it."""
        bound = LossModule(model)
        self._world, self._sending = world, sending or Sending()
        self._is_timed = False
        self._wrapper = self._wrapped(bound, model)
        super().__init__(model, [self._wrapper], [bound])
        self._completing = Completing(self._wrapper, model, world)
        self.notes = self._completing.unused.note.lines

    def _wrapped(self, bound: nn.Module, model: nn.Module, **options: Any) -> DistributedDataParallel:
        sums, bucket_mb = self._sending.sums, self._sending.bucket_mb
        if bucket_mb is not None:
            options["bucket_cap_mb"] = bucket_mb
        wrapper = DistributedDataParallel(bound, gradient_as_bucket_view=True, **options)
        if sums is not None:
            names = {id(weight): name for name, weight in model.named_parameters()}
            # torch compares annotations, which are text here, with types: not the function itself.
            wrapper.register_comm_hook(_SentBuckets(self._world, sums, names), lambda sent, bucket: sent(bucket))
        return wrapper

    def wrap_again(self, sending: Sending | None = None) -> None:
        """Send gradients in another manner, or those of other parameters."""
        before, self._sending = self._wrapper, sending or self._sending
        # All ranks have the same weights.
        self._wrapper = self._wrapped(self.loss_modules[0], self.module, init_sync=False)
        take_over(self._wrapper, before)
        self.replicas[0] = self._wrapper
        self._completing = Completing(self._wrapper, self.module, self._world)
        self.notes = self._completing.unused.note.lines
        if self._is_timed:
            self.time_communication()

    def link_state(self) -> dict[str, torch.Tensor]:
        found = self._sending.compression
        return found.state() if found is not None else {}

    def load_link_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._sending.compression is not None:
            self._sending.compression.load_state(tensors)

    def sync_replicas(self, is_training: bool) -> None:
        if not is_training:
            send_buffers(self)
        elif self._is_timed:
            # Before forward in training, DDP sends buffers itself.
            self._wrapper.require_forward_param_sync = not self._world.communication.is_off

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        return self._completing if is_last else self._wrapper.no_sync()

    def follow_requires_grad(self) -> None:
        self.wrap_again()

    def note_replay(self) -> None:
        self._completing.unused.replayed()

    def time_communication(self) -> None:
        self._is_timed = True
        if self._sending.sums is None:
            self._wrapper.register_comm_hook(self._world, lambda world, bucket: _timed_all_reduce(world, bucket))


def _averaging(model: nn.Module, world: World) -> Averaging | None:
    """Averaging through shared memory, where all ranks are on one machine and on its CPU."""
    shared = world.communication
    if shared.scalars is None or not shared.may_share or not all(world.gather(can_average(model))):
        return None
    weights: list[torch.Tensor] = [weight for _, weight in trained(model)]
    refuse_different_shapes(dist.group.WORLD, weights)
    channel = open_channel(world.gather, world.rank, sum(weight.nbytes for weight in weights), load())
    return Averaging(channel, model, world) if channel is not None else None


BETWEEN_MACHINES_MB = 4.0
"""Of a bucket: small enough that the sum of one overlaps the sending of another, large enough for any latency."""


@dataclass(frozen=True)
class Sending:
    """How gradients reach the other ranks: as torch does it, unless there are `sums`."""

    sums: MachineSum | None = None
    """Gradients cross the network once for each machine, and not once for each rank."""
    bucket_mb: float | None = None
    compression: Compression | None = None
    """That of `sums`, on leaders."""


def _linked(model: nn.Module, world: World, link: str | None) -> DistributedModel:
    """The model, whose gradients are sent as `--link` has it."""
    method = parse_link(link)
    if method.is_local:
        from evenstep.strategies.local_sgd import LocalModel, StreamingModel

        return StreamingModel(model, world, method) if method.is_streaming else LocalModel(model, world, method)
    if method.is_lossy:
        return DDPModel(model, world, _compressed(model, world, method))
    averaging = _averaging(model, world)
    if averaging is not None:
        averaged = AveragedModel(model, averaging, world)
        if method.name == "auto":
            averaged.notes.append("--link auto: one machine, so gradients stay in shared memory")
        return averaged
    sums = _machine_sum(model, world) if link is None or method.name == "auto" else None
    sending = Sending(sums, BETWEEN_MACHINES_MB) if sums is not None else None
    if method.name == "auto":
        from evenstep.strategies.auto_link import AutoModel

        return AutoModel(model, world, sending)
    return DDPModel(model, world, sending)


def _machine_sum(model: nn.Module, world: World) -> MachineSum | None:
    """Where several ranks share a machine, and several machines take part, on CPUs."""
    if world.device.type != "cpu" or not all(world.gather(can_average(model))):
        return None
    if not Machines.of(world).have_several_ranks:
        return None
    sums = MachineSum.open(world, round(BETWEEN_MACHINES_MB * 2**20))
    return sums if sums.machines.have_several_ranks else None


def _compressed(model: nn.Module, world: World, method: LinkMethod) -> Sending:
    """Sums that are compressed between machines; on one machine, between its ranks."""
    from evenstep.strategies.compression import compression

    if not all(world.gather(can_average(model))):
        raise TaskError(
            f"--link {world.communication.link} compresses dense gradients of float32, float64 or bfloat16, and this "
            "model has others (sparse, or of another type); leave --link out"
        )
    has_machines = len(Machines.of(world).groups) > 1
    sums = MachineSum.open(world, round(BETWEEN_MACHINES_MB * 2**20), may_share=has_machines)
    made = compression(method, sums.group) if sums.group is not None else None
    sums.exchange = made
    return Sending(sums, BETWEEN_MACHINES_MB, made)


class _SentBuckets:
    """What DDP calls with every bucket of gradients."""

    def __init__(self, world: World, sums: MachineSum, names: dict[int, str]) -> None:
        self._world, self._sums, self._names = world, sums, names

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        gradients: torch.Tensor = bucket.buffer()
        if self._world.communication.is_off:
            return _at_once(gradients)
        arrived = self._world.spans.send(f"bucket {bucket.index()}", [gradients])
        names = [self._names[id(weight)] for weight in bucket.parameters()]
        parts = list(zip(names, bucket.gradients(), strict=True))
        sent = self._sums.start(Message(gradients, parts, arrived))
        if bucket.is_last():
            self._world.spans.part("communication")
        return sent


def _at_once(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def _timed_all_reduce(world: World, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The all-reduce that DDP does with a bucket by default, announced."""
    gradients: torch.Tensor = bucket.buffer()
    if world.communication.is_off:
        return _at_once(gradients)
    arrived = world.spans.send(f"bucket {bucket.index()}", [gradients])
    # Not div_: DDP itself multiplies.
    gradients.mul_(1 / dist.get_world_size())
    sending: dist.Work = dist.all_reduce(gradients, async_op=True)
    if bucket.is_last():
        # The last gradient is computed: from here on, there is nothing that communication could overlap with.
        world.spans.part("communication")

    def received(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        arrived()
        return future.value()[0]

    return sending.get_future().then(received)


def send_buffers(model: DistributedModel, world: World | None = None) -> None:
    """Send rank 0's buffers to all ranks, each of which kept its own; with a world, as a part of a step."""
    buffers = list(model.module.buffers())
    if world is None or not buffers:
        send_from_rank_0(buffers)
    elif not world.communication.is_off:
        arrived = world.spans.send("buffers", buffers, waits=True)
        send_from_rank_0(buffers)
        arrived()


def send_from_rank_0(tensors: list[torch.Tensor]) -> None:
    """Copies of rank 0's tensors to all ranks, a few large messages at a time."""
    if tensors:
        broadcast_coalesced(dist.group.WORLD, tensors, SEND_BYTES, 0)
