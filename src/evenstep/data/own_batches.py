"""Batches of plain tensors that a custom loop brings itself: what each process collected, or a part of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from evenstep.data.iterable import Stream
from evenstep.data.loader import Batch, Loader, MicroBatch
from evenstep.data.nested import leaves, map_tensors
from evenstep.data.prefetch import LoaderOptions
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.sampling.batch_shares import share
from evenstep.sampling.order import Span


class OwnBatches(Loader):
    """Where a loop without a loader stands: the steps and samples it has taken. There is nothing to iterate over."""

    def __init__(self, world: World, fit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(Stream((), None, "own"), None, world, 1, LoaderOptions(workers=0, compare=False, fit=fit))
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()
        """The optimizers that have taken the current step."""
        self._is_next = True
        """Whether the batch that is finished next begins a step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a batch is finished: several optimizers, each stepped once, take one step together."""
        self._is_next = not self._stepped or optimizer in self._stepped
        if self._is_next:
            self._stepped = WeakSet()
        self._stepped.add(optimizer)

    def begins_step(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether a backward for these begins a step: not if another optimizer alone has taken the current one."""
        stepped = {id(one) for each in self._stepped for group in each.param_groups for one in group["params"]}
        return not stepped or any(id(weight) in stepped for weight in weights)

    def make(self, data: Any) -> Batch:
        """One step of `data`, this process's part of it: tensors with a row for each sample. All ranks call this."""
        num = num_rows(data)
        self._world.heartbeat.step = self.num_finished + 1
        total = self._total(num)
        if not total:
            raise TaskError("backward was given empty batches on every rank; skip such a step")
        devices = self._world.devices
        rounds = [[share(num, replica, len(devices)) for replica in range(len(devices))]]
        if self._world.num_virtual is not None:
            rounds = self._virtual(num, total)
        parts = [[self._part(data, *each) for each in zip(shares, devices, strict=True)] for shares in rounds]
        return Batch(Span(0, self.position, self.position + total), parts, self, False, None)

    def _virtual(self, num: int, total: int) -> list[list[range]]:
        """Which of this process's rows each virtual replica gets; all processes' rows are one batch, in their order."""
        of_replicas = self.split.by_replica(total)
        own = of_replicas[self._world.replicas.start : self._world.replicas.stop]
        first, expected = own[0].start, sum(map(len, own))
        problem = f"has {num} rows instead of {expected}" if num != expected else None
        problems = self._world.agree(problem)
        if problems:
            raise TaskError(
                f"with {self.split.num_virtual} virtual replicas, each process brings its part of the {total} rows: "
                f"{problems[0]}; use team.loader, or slices of the same batch: {[len(one) for one in of_replicas]} rows"
            )
        return [
            [range(part.start - first, part.stop - first) if part else part for part in per_replica]
            for per_replica in self.split.ranges(total)
        ]

    def count(self, batch: Batch) -> None:
        """Count the batch of a step, one of a loader or not."""
        self.position += batch.num_samples
        self.num_finished += self._is_next

    def _finished(self, batch: Batch) -> None:
        self.count(batch)

    def _total(self, num: int) -> int:
        """The rows of all ranks."""
        total = torch.tensor([num if self._world.counts else 0], dtype=torch.float64)
        work = self._world.total(total)
        if work is not None:
            work.wait()
        return int(total.item())

    def _part(self, data: Any, own: range, device: torch.device) -> MicroBatch:
        rows = map_tensors(data, partial(_rows, own=own))
        if self._world.num_virtual is not None:
            # Kernels may compute other bits from other alignments, which a slice of a larger batch has.
            rows = map_tensors(rows, torch.clone)
        inputs = map_tensors(rows, lambda tensor: self._options.fit(tensor.to(device, non_blocking=True)))
        return MicroBatch(inputs, np.arange(own.start, own.stop), len(own))


def num_rows(data: Any) -> int:
    """The samples of nested tensors, which all have a row for each."""
    lengths = sorted({len(leaf) for leaf in leaves(data) if isinstance(leaf, torch.Tensor) and leaf.ndim})
    if not lengths:
        raise TaskError(
            f"backward takes a batch of team.loader, or tensors with a row for each sample, and got a "
            f"{type(data).__name__}; write: for batch in team.loader(data, batch=64): team.backward(loss, model, batch)"
        )
    if len(lengths) > 1:
        raise TaskError(
            f"the tensors given to backward have {lengths[0]} and {lengths[-1]} rows; each needs a row for each sample"
        )
    return lengths[0]


def _rows(tensor: torch.Tensor, own: range) -> torch.Tensor:
    if not tensor.ndim:
        return tensor
    if not len(tensor):
        # It counts for nothing: collectives need every rank.
        return tensor.new_zeros((1, *tensor.shape[1:]))
    return tensor[own.start : own.stop] if own else tensor[:1]
