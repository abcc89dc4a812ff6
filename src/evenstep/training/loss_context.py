"""What a loss can call while it is computed: `evenstep.gather`, `evenstep.log` and `evenstep.progress`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evenstep.data.loader import Batch
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.task import Amount

if TYPE_CHECKING:
    from evenstep.distributed.autograd_gather import Meeting, RowExchange

_thread = threading.local()
"""`call` is the LossCall that this thread computes."""
called_outside: set[str] = set()
"""Which of these functions were called while no batch of a training was computed, as `verify` does."""


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all devices, one for each sample of the global batch, in their order, with gradients.

    def loss(model, batch):
        one, other = (evenstep.gather(model(view)) for view in batch)
        return nt_xent(one, other)

    The loss is then that of the whole batch, or of this device's rows against all: both equal one device.
    """
    call: LossCall | None = getattr(_thread, "call", None)
    if call is None:
        called_outside.add("gather")
        return tensor
    return call.context.gather(tensor, call)


def log(values: Mapping[str, Amount]) -> None:
    """Record more values of a step than its loss: means over the samples, one value per sample, or (sum, count).

    evenstep.log({"reconstruction": reconstruction, "accuracy": logits.argmax(1) == labels})

    They are summed over devices and micro-batches like the loss, and sent with it. Evaluations record metrics instead.
    """
    _check_values(values)
    call: LossCall | None = getattr(_thread, "call", None)
    if call is None:
        called_outside.add("log")
        return
    call.context.called.add("log")
    call.logged += [(name, _detached(value)) for name, value in values.items()]


@dataclass(frozen=True)
class TrainingProgress:
    """Where a training is."""

    step: int
    """The number of this step, from 1; in an evaluation, that of the last one."""
    epoch: int
    """From 0."""


def progress() -> TrainingProgress:
    """The step and the epoch of the batch whose loss is computed; step 0 outside of a training."""
    call: LossCall | None = getattr(_thread, "call", None)
    if call is None:
        called_outside.add("progress")
        return TrainingProgress(0, 0)
    return call.context.progress()


def current_replica() -> int:
    """The replica of this process whose loss this thread computes."""
    call: LossCall | None = getattr(_thread, "call", None)
    return call.replica if call is not None else 0


def computes_samples() -> bool:
    """Whether this thread computes the loss of samples, not of one that stands in for none."""
    call: LossCall | None = getattr(_thread, "call", None)
    return call is not None and call.num_samples > 0


class LossContext:
    """One global batch of which losses are computed; the replicas of this process share it."""

    __slots__ = ("_at", "_num_micro", "_num_samples", "_split", "called", "is_alone", "meeting", "world")

    def __init__(
        self,
        world: World,
        batch: Batch,
        called: set[str] | None = None,
        at: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """`at` returns the step and the epoch, where they are not those of the batch."""
        self.world = world
        self._num_samples, self._num_micro = batch.num_samples, len(batch.micro_batches)
        self._split = batch.loader.split
        self._at = at or (lambda: (batch.loader.num_finished + 1, batch.span.epoch))
        self.called = set() if called is None else called
        """Names of functions of this module that the loss called."""
        self.is_alone = False
        """Whether replicas are tried one after the other, though there are others."""
        self.meeting: Meeting | None = None
        """Of several replicas in this process."""
        if len(world.devices) > 1:
            from evenstep.distributed.autograd_gather import Meeting

            self.meeting = Meeting(len(world.devices))

    def on(self, replica: int, num_samples: int) -> LossCall:
        """Around what one replica of this process computes of a micro-batch, backward included."""
        return LossCall(self, replica, num_samples)

    def progress(self) -> TrainingProgress:
        self.called.add("progress")
        return TrainingProgress(*self._at())

    def gather(self, tensor: torch.Tensor, call: LossCall) -> torch.Tensor:
        world = self.world
        self.called.add("gather")
        if world.num_virtual not in (None, 1):
            raise TaskError(
                f"evenstep.gather makes a loss of the whole batch, and --virtual-replicas {world.num_virtual} computes "
                "it in parts that do not depend on the devices;\nleave one of them out"
            )
        if self._num_micro > 1:
            raise TaskError(
                f"evenstep.gather needs the whole batch at once, and --accumulate splits it into {self._num_micro} "
                "micro-batches;\nleave --accumulate out, and use more devices or a smaller --batch if memory is short"
            )
        counts = [len(own) for own in self._split.by_replica(self._num_samples)]
        _check_rows(tensor, max(1, counts[world.replicas[call.replica]]))
        return tensor if world.num_replicas == 1 else self._gathered(tensor, call, counts)

    def _gathered(self, tensor: torch.Tensor, call: LossCall, counts: list[int]) -> torch.Tensor:
        from evenstep.distributed.autograd_gather import ProcessRows, RepeatedRows, ThreadRows, gather_rows

        world, replica = self.world, call.replica
        exchange: RowExchange
        if self.meeting is None:
            exchange = ProcessRows(world if world.ranks_per_replica == 1 else world.data_ranks, counts)
        elif self.is_alone or world.communication.is_off:
            exchange = RepeatedRows(replica, counts)
        else:
            exchange = ThreadRows(self.meeting, replica, counts, world.devices[replica])
            if shares_gpu(world) and tensor.requires_grad and torch.is_grad_enabled():
                return call.defer(tensor, exchange)
        return gather_rows(tensor, exchange)


class LossCall:
    """One replica's call of the loss; inside, the functions of this module know it."""

    __slots__ = ("context", "deferred", "logged", "num_samples", "replica")

    def __init__(self, context: LossContext, replica: int, num_samples: int) -> None:
        self.context, self.replica, self.num_samples = context, replica, num_samples
        self.logged: list[tuple[str, Amount]] = []
        self.deferred: list[tuple[torch.Tensor, torch.Tensor, RowExchange]] = []
        """Own rows, all rows, and the way back: where backward of a gather is not a part of that of the loss."""

    def __enter__(self) -> LossCall:
        _thread.call = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.call = None
        if self.context.meeting is not None and not self.context.is_alone:
            self.context.meeting.leave(self.replica)

    def defer(self, tensor: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        """All rows, cut off from the graph of the own ones, which `finish_backward` takes up again."""
        rows = exchange.collect(tensor.detach()).requires_grad_()
        self.deferred.append((tensor, rows, exchange))
        return rows.clone()

    def finish_backward(self) -> None:
        """Send the gradients of gathered rows back, after the backward of the loss, which kept the graph."""
        for tensor, rows, exchange in reversed(self.deferred):
            gradients = rows.grad if rows.grad is not None else torch.zeros_like(rows)
            torch.autograd.backward(tensor, exchange.sum_own(gradients), retain_graph=True)


def _detached(value: Any) -> Any:
    """Without its graph, whose memory would be kept."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return tuple(map(_detached, value)) if isinstance(value, tuple | list) else value


def _check_values(values: Any) -> None:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise TaskError('evenstep.log takes a dict of named values: evenstep.log({"accuracy": correct})')
    for name, value in values.items():
        if not isinstance(value, torch.Tensor | int | float | tuple | list):
            raise TaskError(
                f"evenstep.log takes numbers and tensors, and {name!r} is a {type(value).__name__}; give a mean over "
                "the samples, one value per sample, or a pair (sum, count)"
            )


def _check_rows(tensor: torch.Tensor, num_samples: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TaskError(f"evenstep.gather takes a tensor, and got a {type(tensor).__name__}")
    if tensor.ndim and len(tensor) == num_samples:
        return
    raise TaskError(
        f"evenstep.gather takes one row for each sample: there are {num_samples} on this device, and the tensor has "
        f"shape {tuple(tensor.shape)}.\nGather each view separately, torch.cat([gather(a), gather(b)]), or make rows "
        "of them: tensor.view(num_samples, -1)"
    )


def shares_gpu(world: World) -> bool:
    """Whether two replicas do: autograd has one thread for each GPU, in which their backwards cannot wait."""
    gpus = [device for device in world.devices if device.type != "cpu"]
    return len(set(gpus)) < len(gpus)
