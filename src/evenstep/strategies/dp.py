"""One process, one persistent replica per device, one thread each.

A step of nn.DataParallel is scatter, replicate, forward, gather, loss, reduce, update. Here:

    scatter     the loader hands every replica its own share, straight to its device
    replicate   each device sends the parameters it updates to the others; replicas are never rebuilt
    forward     in every replica, and the loss and backward with it: no outputs are gathered on device 0
    reduce      each device receives the gradients of the parameters it updates, in one copy from each other device
    update      each device updates its part of the parameters, and holds the optimizer state of that part alone

So memory is even: device 0 holds no more than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from evenstep.distributed.autograd_gather import MeetingLeft
from evenstep.distributed.devices import return_to_default_stream
from evenstep.distributed.step_spans import drive_replica
from evenstep.distributed.world import World
from evenstep.private_apis import (
    flatten_dense_tensors,
    foreach_add_,
    foreach_copy_,
    take_buffers,
    unflatten_dense_tensors,
)
from evenstep.strategies.base import NOTHING, DistributedModel, LossModule, Sample, copied, on

if TYPE_CHECKING:
    from evenstep.distributed.gradient_tree import Gradients, GradientTree

T = TypeVar("T")


class DP:
    """What nn.DataParallel does, without its flaws."""

    def __init__(self) -> None:
        self._threads: list[ThreadPoolExecutor] = []
        """One for each replica, shared by all models: what torch keeps per thread (device, streams) is made once."""

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        while len(self._threads) < len(world.devices):
            replica = len(self._threads)
            arguments = replica, world.devices[replica]
            self._threads.append(ThreadPoolExecutor(1, f"replica-{replica}", _start_thread, arguments))
        for device in reversed(world.devices):
            # Where the replicas' threads are, too.
            return_to_default_stream(device)
        return Replicas(model, world, self._threads)


def _start_thread(replica: int, device: torch.device) -> None:
    drive_replica(replica)
    if device.type == "cuda":
        # cuBLAS warns where its call is the first of a thread to CUDA.
        torch.cuda.synchronize(device)


class Replicas(DistributedModel):
    """The same model on several devices; `module` is made of the parameters that each device owns."""

    def __init__(self, model: nn.Module, world: World, threads: Sequence[ThreadPoolExecutor]) -> None:
        devices = world.devices
        models = [model.to(devices[0])]
        models += [copied(model).to(device) for device in devices[1:]]
        self.parameters_of = [list(one.parameters()) for one in models]
        self.buffers_of = [list(one.buffers()) for one in models]
        self.owned = _balanced([weight.numel() for weight in self.parameters_of[0]], len(devices))
        # A copy of the tree only.
        memo: dict[int, Any] = {id(buffer): buffer for buffer in self.buffers_of[0]}
        for owner, indices in enumerate(self.owned):
            memo |= {id(self.parameters_of[0][index]): self.parameters_of[owner][index] for index in indices}
        super().__init__(copied(models[0], memo), [LossModule(one) for one in models])
        self.models = models
        self._threads = threads
        self._world = world

    def run(self, work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        # A thread per replica, always the same one.
        futures = [
            thread.submit(self._work, device, work, *replica_arguments)
            for thread, device, replica_arguments in zip(self._threads, self._world.devices, arguments, strict=False)
        ]
        return _results(futures)

    def _work(self, device: torch.device, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return work(*arguments)
        finally:
            if self._world.spans.listeners:
                # The timer reads the clock of the current device.
                with on(device):
                    self._world.spans.leave()

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        return self._reducing() if is_last else NOTHING

    def follow_requires_grad(self) -> None:
        for owner, indices in enumerate(self.owned):
            for index in indices:
                for weights in self.parameters_of:
                    weights[index].requires_grad_(self.parameters_of[owner][index].requires_grad)

    @torch.no_grad()
    def sync_replicas(self, is_training: bool) -> None:
        """Send every parameter from its owner to the other devices, and the buffers of device 0."""
        if self._world.communication.is_off:
            return
        spans = self._world.spans
        if is_training:
            spans.part("replicate")
        self._replicate()
        if is_training:
            spans.send("parameters", self.parameters_of[0] * (len(self.models) - 1))
            spans.part("forward")

    @torch.no_grad()
    def refresh(self) -> None:
        self._replicate()

    def _replicate(self) -> None:
        for owner, receiver in self._pairs():
            _copy(
                [self.parameters_of[owner][index] for index in self.owned[owner]],
                [self.parameters_of[receiver][index] for index in self.owned[owner]],
            )
        # As in nn.DataParallel: device 0 keeps what it saw, the others start from that.
        self.buffers_of = [list(one.buffers()) for one in self.models]
        for receiver in range(1, len(self.models)):
            _copy(self.buffers_of[0], self.buffers_of[receiver])

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        yield
        self._reduce()
        if not self._has_noted_unused:
            self.note_unused()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Sum every gradient on the device that owns its parameter; the other replicas' gradients are freed."""
        spans = self._world.spans
        spans.part("reduce")
        for owner, sender in self._pairs():
            sent = [index for index in self.owned[owner] if self.parameters_of[sender][index].grad is not None]
            gradients = [self.parameters_of[sender][index].grad for index in sent]
            if not self._world.communication.is_off:
                _add([self.parameters_of[owner][index] for index in sent], gradients)  # type: ignore[arg-type]
                spans.send("gradients", gradients)  # type: ignore[arg-type]
            for index in sent:
                self.parameters_of[sender][index].grad = None
        self._keep_buffers()
        spans.part("backward")

    def _keep_buffers(self) -> None:
        for whole, first in zip(self.module.modules(), self.models[0].modules(), strict=True):
            # A module may have put a new tensor in a buffer's place; the checkpoint must see that one.
            take_buffers(whole, first)

    @torch.no_grad()
    def sum_trees(self, trees: Sequence[GradientTree], virtual: tuple[range, ...]) -> None:
        """Sum the nodes of all devices, every gradient on the device that owns its parameter."""
        from evenstep.distributed.gradient_tree import Layout, give, total

        spans = self._world.spans
        spans.part("reduce")
        for owner, indices in enumerate(self.owned):
            weights = [self.parameters_of[owner][index] for index in indices]
            nodes = [
                self._sent_to(owner, sender, [sums[index] for index in indices])
                for sender, tree in enumerate(trees)
                for sums in tree.sums
            ]
            give(weights, total(nodes, Layout.of(virtual)))
        self._keep_buffers()
        spans.part("backward")
        if not self._has_noted_unused:
            self.note_unused()

    def _sent_to(self, owner: int, sender: int, gradients: Gradients) -> Gradients:
        """Gradients on the owner's device; in memory of their own there, for others are added to them."""
        if owner == sender or self._world.devices[owner] == self._world.devices[sender]:
            return gradients
        there = [gradient for gradient in gradients if gradient is not None]
        self._world.spans.send("gradients", there)
        arrived = iter(_sent(there, self._world.devices[owner]))
        return [None if gradient is None else next(arrived) for gradient in gradients]

    def _pairs(self) -> list[tuple[int, int]]:
        num = len(self.models)
        return [(owner, other) for owner in range(num) for other in range(num) if other != owner]


def _results(futures: Sequence[Future[T]]) -> list[T]:
    """What all replicas return; the first error, and before others those that are not the result of another's."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, MeetingLeft)), errors[0])
    return [future.result() for future in futures]


def _balanced(sizes: Sequence[int], num_owners: int) -> list[list[int]]:
    """Indices dealt to owners, largest first, each to the one that holds least; in model order within an owner."""
    held = [0] * num_owners
    owned: list[list[int]] = [[] for _ in range(num_owners)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = held.index(min(held))
        held[owner] += sizes[index]
        owned[owner].append(index)
    return [sorted(indices) for indices in owned]


def _sent(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The tensors on `device`, in one copy per type."""
    if not tensors or tensors[0].device == device:
        return tensors
    arrived: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        group = [tensors[index] for index in indices]
        flat = flatten_dense_tensors(group).to(device, non_blocking=device.type == "cuda")
        arrived |= dict(zip(indices, unflatten_dense_tensors(flat, group), strict=True))
    return [arrived[index] for index in range(len(tensors))]


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    if sources:
        foreach_copy_(list(targets), _sent(list(sources), targets[0].device))


def _add(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
    if not parameters:
        return
    arrived = _sent(list(gradients), parameters[0].device)
    sums: list[torch.Tensor] = []
    more: list[torch.Tensor] = []
    for parameter, gradient in zip(parameters, arrived, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            sums.append(parameter.grad)
            more.append(gradient)
    if sums:
        foreach_add_(sums, more)
