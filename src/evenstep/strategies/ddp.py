"""One process per device; each holds the whole model, and gradients are averaged during backward or after it.

Across GPUs and machines torch's DistributedDataParallel does that. On one machine's CPU, gradients are averaged through
shared memory after backward: DDP's buckets would copy every gradient once more, and there is nothing to overlap with,
since the cores that sum are those that compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from evenstep.distributed.devices import leave_default_stream
from evenstep.distributed.shm.allreduce import DTYPES, Channel, open_channel
from evenstep.distributed.shm.native import load
from evenstep.distributed.world import World
from evenstep.errors import TaskError, TrainingError
from evenstep.internals import broadcast_coalesced, is_traceable_wrapper_subclass, refuse_different_shapes
from evenstep.strategies.base import NOTHING, DistributedModel, LossModule, Sample, fills_memory, has_sparse_gradients
from evenstep.strategies.single import Single


class Averaging:
    """Surrounds the last backward of a step."""

    def __init__(self, channel: Channel, model: nn.Module, world: World) -> None:
        self._channel, self._world = channel, world
        self._is_broken = False
        self._names, self._weights = zip(*trained(model), strict=True)
        self._is_plain = [weight.is_contiguous() for weight in self._weights]
        self._dtypes = [weight.dtype for weight in self._weights]
        self._kinds = [[i for i, one in enumerate(self._dtypes) if one == kind] for kind in dict.fromkeys(self._dtypes)]
        """The indices of weights, by type: a channel averages those of one type at a time."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        if error is None and not self._world.communication.is_off:
            self._average()

    def _average(self) -> None:
        rows = [
            gradient
            if is_plain and gradient is not None and gradient.dtype is dtype and gradient.is_contiguous()
            else self._as_row(index)
            for index, (gradient, is_plain, dtype) in enumerate(
                zip([weight.grad for weight in self._weights], self._is_plain, self._dtypes, strict=True)
            )
        ]
        spans = self._world.spans
        spans.part("reduce")
        arrived = spans.send("gradients", rows)
        if self._is_broken:
            raise TrainingError("averaging gradients was interrupted and cannot continue; start the run again")
        self._is_broken = True
        for indices in self._kinds:
            self._channel.average([rows[index] for index in indices])
        self._is_broken = False
        arrived()
        spans.part("backward")

    def _as_row(self, index: int) -> torch.Tensor:
        """A gradient that does not lie in memory in the order in which its numbers are counted; its weight may not."""
        weight: nn.Parameter = self._weights[index]
        if weight.grad is None:
            raise no_gradient([name for name, one in zip(self._names, self._weights, strict=True) if one.grad is None])
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


def no_gradient(names: list[str]) -> TaskError:
    """A step would go wrong: some rank's parameters have no gradient to average."""
    return TaskError(
        f"no gradient reaches {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}, and ddp averages one "
        "of every parameter.\nUse them in the loss, or switch them off: parameter.requires_grad_(False)"
    )


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
        averaging = _averaging(model, world)
        return AveragedModel(model, averaging, world) if averaging is not None else DDPModel(model, world)


class RankModel(DistributedModel):
    """A whole model in each of several processes, each with buffers of its own."""

    def sync_replicas(self, is_training: bool) -> None:
        if not is_training:
            send_buffers(self)


class AveragedModel(DistributedModel):
    """Gradients are averaged through shared memory after backward; buffers are sent at every step, as DDP does."""

    def __init__(self, model: nn.Module, averaging: Averaging, world: World) -> None:
        # As DDP does.
        send_from_rank_0([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])
        super().__init__(model, [LossModule(model)])
        self._averaging, self._world = averaging, world

    def sync_replicas(self, is_training: bool) -> None:
        if not is_training:
            send_buffers(self)
        elif self.has_buffers:
            send_buffers(self, self._world)

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        return self._averaging if is_last else NOTHING


class DDPModel(RankModel):
    """The loss inside torch's DistributedDataParallel, which sends buckets of gradients while backward runs."""

    is_wrapped: ClassVar[bool] = True

    def __init__(self, model: nn.Module, world: World) -> None:
        bound = LossModule(model)
        self._wrapper = DistributedDataParallel(bound, gradient_as_bucket_view=True)
        super().__init__(model, [self._wrapper], [bound])
        self._world = world
        self._is_first_step = True
        self._is_timed = False

    def sync_replicas(self, is_training: bool) -> None:
        if not is_training:
            send_buffers(self)
        elif self._is_timed:
            # Before forward in training, DDP sends buffers itself.
            self._wrapper.require_forward_param_sync = not self._world.communication.is_off

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        if not is_last:
            return self._wrapper.no_sync()
        if not self._is_first_step:
            return NOTHING
        self._is_first_step = False
        return self._checking()

    def time_communication(self) -> None:
        self._is_timed = True
        # torch compares annotations, which are text here, with types: not the function itself.
        self._wrapper.register_comm_hook(self._world, lambda world, bucket: _timed_all_reduce(world, bucket))

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """After the first backward: DDP waits for every gradient, and would stop at the second step with no names."""
        yield
        without = [name for name, weight in trained(self.module) if weight.grad is None]
        if without:
            raise no_gradient(without)


def _averaging(model: nn.Module, world: World) -> Averaging | None:
    """Averaging through shared memory, where all ranks are on one machine and on its CPU."""
    shared = world.communication
    if shared.scalars is None or not shared.may_share or not all(world.gather(can_average(model))):
        return None
    weights: list[torch.Tensor] = [weight for _, weight in trained(model)]
    refuse_different_shapes(dist.group.WORLD, weights)
    channel = open_channel(world.gather, world.rank, sum(weight.nbytes for weight in weights), load())
    return Averaging(channel, model, world) if channel is not None else None


def _timed_all_reduce(world: World, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The all-reduce that DDP does with a bucket by default, announced."""
    gradients: torch.Tensor = bucket.buffer()
    if world.communication.is_off:
        at_once: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        at_once.set_result(gradients)
        return at_once
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
