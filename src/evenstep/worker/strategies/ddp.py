"""One process per device; each holds the whole model, and gradients are averaged, while backward runs or after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

from evenstep.worker.comm.averaging import Averaging, can_average, no_gradient, trained
from evenstep.worker.comm.channel import open_channel
from evenstep.worker.comm.library import load
from evenstep.worker.seats import NOTHING
from evenstep.worker.spread import Bound, Spread
from evenstep.worker.strategies.single import Sample, Single
from evenstep.worker.streams import leave_default_stream
from evenstep.worker.tap import Tap, size_of
from evenstep.worker.world import World

SEND_BYTES = 2**28


class DDP(Single):
    """torch's DistributedDataParallel around the whole loss; on one machine's CPU, shared memory and no wrapper."""

    processes_per_device: ClassVar[bool] = True
    wraps_alone: ClassVar[bool] = False
    """One process has nothing to average, and DDP's buckets would cost it a copy of every gradient."""

    def __init__(self) -> None:
        self._checked: WeakSet[Spread] = WeakSet()
        self._near: WeakKeyDictionary[Spread, Averaging] = WeakKeyDictionary()
        """Models whose gradients go through shared memory."""
        self._tap: Tap | None = None

    def spread(self, model: nn.Module, world: World, sample: Sample | None = None) -> Spread:
        if world.size == 1 and not self.wraps_alone:
            return super().spread(model, world)
        model.to(world.device)
        leave_default_stream(world.device)
        bound = Bound(model)
        if not trained(model):
            # DDP refuses a model with nothing to train; such a one rides along beside another that trains.
            return Spread(model, [bound])
        averaging = _averaging(model, world)
        if averaging is None:
            return Spread(model, [DistributedDataParallel(bound, gradient_as_bucket_view=True)], [bound])
        # As DDP does.
        send_from_rank_0([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])
        spread = Spread(model, [bound])
        self._near[spread] = averaging
        return spread

    def refresh(self, spread: Spread, is_training: bool) -> None:
        if not is_training:
            send_buffers(spread)
        elif isinstance(spread.seats[0], DistributedDataParallel):
            # Before forward in training, DDP does it itself.
            if self._tap is not None:
                spread.seats[0].require_forward_param_sync = not self._tap.is_muted
        elif spread in self._near and spread.has_buffers:
            send_buffers(spread, self._tap)

    def syncing(self, spread: Spread, is_last: bool) -> AbstractContextManager[None]:
        averaging = self._near.get(spread)
        if averaging is not None:
            return averaging if is_last else NOTHING
        seat = spread.seats[0]
        if not isinstance(seat, DistributedDataParallel):
            return NOTHING
        if not is_last:
            return seat.no_sync()
        if spread in self._checked:
            return NOTHING
        self._checked.add(spread)
        return _checking(spread)

    def tell(self, spread: Spread, tap: Tap) -> None:
        self._tap = tap
        if isinstance(spread.seats[0], DistributedDataParallel):
            # torch compares annotations, which are text here, with types: not the function itself.
            spread.seats[0].register_comm_hook(tap, lambda tap, bucket: _told_of(tap, bucket))


def _averaging(model: nn.Module, world: World) -> Averaging | None:
    """The way through shared memory, where all ranks are on one machine and on its CPU."""
    if world.nearby.mailbox is None or not world.nearby.may_share or not all(world.gather(can_average(model))):
        return None
    weights: list[torch.Tensor] = [weight for _, weight in trained(model)]
    group: Any = dist.group.WORLD
    _verify_param_shape_across_processes(group, weights)
    channel = open_channel(world.gather, world.rank, size_of(weights), load())
    return Averaging(channel, model, world.tap) if channel is not None else None


def _told_of(tap: Tap, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """What DDP does with a bucket by itself, between two looks at the clock."""
    gradients: torch.Tensor = bucket.buffer()
    if tap.is_muted:
        at_once: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        at_once.set_result(gradients)
        return at_once
    begin, name = tap.now(), f"bucket {bucket.index()}"
    tap.sent([gradients])
    gradients.div_(dist.get_world_size())
    sending: dist.Work = dist.all_reduce(gradients, async_op=True)
    if bucket.is_last():
        # The last gradient is computed: from here on, there is nothing to hide the sending behind.
        tap.mark("communication")

    def arrived(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        tap.travelled(name, begin)
        return future.value()[0]

    return sending.get_future().then(arrived)


def send_buffers(spread: Spread, tap: Tap | None = None) -> None:
    """Rank 0's batch statistics to all ranks, each of which kept its own; a tap is told of it, or hinders it."""
    buffers = list(spread.module.buffers())
    if tap is None or not buffers:
        send_from_rank_0(buffers)
    elif not tap.is_muted:
        with tap.sending("buffers", size_of(buffers), then="forward"):
            send_from_rank_0(buffers)


def send_from_rank_0(tensors: list[torch.Tensor]) -> None:
    """Copies of rank 0's tensors to all ranks, a few large messages at a time."""
    if tensors:
        group: Any = dist.group.WORLD
        dist._broadcast_coalesced(group, tensors, SEND_BYTES, 0)  # type: ignore[attr-defined]


@contextmanager
def _checking(spread: Spread) -> Iterator[None]:
    """After the first backward: DDP waits for every gradient, and would stop at the second step with no names."""
    yield
    without = [name for name, weight in trained(spread.module) if weight.grad is None]
    if without:
        raise no_gradient(without)
