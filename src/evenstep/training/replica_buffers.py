"""Buffers that forward changes, under virtual replicas: BatchNorm's running statistics, and others like them.

Every virtual replica starts from the buffers that the step began with. After the step, a buffer of floats is the mean
of what all of them made of it, summed in one order; one of whole numbers is what each of them made of it. So the
buffers have the same bits on every rank, on any number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from evenstep.distributed.gradient_tree import Node, additions
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.internals import NormBase, version_of
from evenstep.strategies.base import DistributedModel


class Slot(NamedTuple):
    """Where a model keeps a buffer; a module may put another tensor there."""

    owner: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.owner, self.key)
        return found


class BufferStart(NamedTuple):
    """A buffer before a step."""

    tensor: torch.Tensor
    version: int
    values: torch.Tensor
    """A copy."""


def refuse_synchronised(model: nn.Module) -> None:
    """Raise TaskError for layers that normalize by the samples of all processes."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise TaskError(
                f"{name or 'the model'} is a SyncBatchNorm, and with --replicas a virtual replica is computed without "
                "the others; use nn.BatchNorm2d, which normalizes by the samples of its virtual replica"
            )


class ReplicaBuffers:
    """The buffers of one model, on all replicas of this process."""

    def __init__(self, model: DistributedModel, world: World) -> None:
        refuse_synchronised(model.module)
        self._world = world
        slots = [_slots(replica) for replica in model.loss_modules]
        self._names = [name.removeprefix("model.") for name in slots[0]]
        self._slots = [list(of_replica.values()) for of_replica in slots]
        """Of each replica, in one order."""
        self._written = [index for index, slot in enumerate(self._slots[0]) if _is_written(slot)]
        """Those that forward changes, as far as all ranks know."""
        self._starts: list[dict[int, BufferStart]] = [{} for _ in slots]
        self._ends: dict[int, dict[int, torch.Tensor]] = {}
        """What each virtual replica of this process made of the buffers that it changed."""
        self._is_first = True

    def start(self) -> None:
        """Before a step."""
        self._ends = {}
        for slots, starts in zip(self._slots, self._starts, strict=True):
            for index, slot in enumerate(slots):
                before, tensor = starts.get(index), slot.tensor
                is_kept = before is not None and before.tensor is tensor and before.version == version_of(tensor)
                if not is_kept or index in self._written:
                    starts[index] = BufferStart(tensor, version_of(tensor), tensor.detach().clone())

    @torch.no_grad()
    def begin(self, replica: int) -> None:
        """Before a virtual replica: the buffers are those before the step."""
        for index, start in self._starts[replica].items():
            slot = self._slots[replica][index]
            if slot.tensor is not start.tensor:
                setattr(slot.owner, slot.key, start.tensor)
            if index in self._written or version_of(start.tensor) != start.version:
                start.tensor.copy_(start.values)

    def end(self, replica: int, virtual: int) -> None:
        """After a virtual replica."""
        self._ends[virtual] = {
            index: self._slots[replica][index].tensor.detach().clone()
            for index, start in self._starts[replica].items()
            if index in self._written or self._is_changed(self._slots[replica][index].tensor, start)
        }

    def _is_changed(self, tensor: torch.Tensor, start: BufferStart) -> bool:
        if tensor is not start.tensor or version_of(tensor) != start.version:
            return True
        # torch's own batch_norm changes what it is given without counting that as a change.
        return self._is_first and not torch.equal(tensor, start.values)

    @torch.no_grad()
    def finish(self, num_present: int) -> None:
        """After a step of which the first `num_present` virtual replicas had samples; all ranks call this."""
        self._learn()
        for replica in range(len(self._slots)):
            self.begin(replica)
        self._is_first = False
        if not self._written:
            return
        sizes = [self._starts[0][index].values.numel() for index in self._written]
        columns = self._table(sizes)[:num_present].split(sizes, dim=1)
        for index, rows in zip(self._written, columns, strict=True):
            combined = self._combined(index, rows)
            for starts in self._starts:
                target = starts[index].tensor
                target.copy_(combined.view(target.shape))

    def _learn(self) -> None:
        """Agree with all ranks on the buffers that forward changes; usually those of BatchNorm, known before."""
        if len(self._written) == len(self._names):
            return
        new = {index for ends in self._ends.values() for index in ends} - {*self._written}
        flag = torch.full((), float(len(new)), dtype=torch.float64)
        work = self._world.total(flag)
        if work is not None:
            work.wait()
        if flag.item():
            every = self._world.gather(sorted(new))
            self._written = sorted({*self._written, *(index for of_rank in every for index in of_rank)})

    def _table(self, sizes: Sequence[int]) -> torch.Tensor:
        """What each virtual replica made of the buffers, one row for each, on every rank."""
        device = self._starts[0][self._written[0]].values.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        table = torch.zeros(self._world.num_virtual or 0, sum(sizes), dtype=wide, device=device)
        for virtual, ends in self._ends.items():
            values = [ends.get(index, self._starts[0][index].values) for index in self._written]
            for place, index in enumerate(self._written):
                self._refuse_shape(index, values[place])
            # Added to the zeros, on one device as on several.
            table[virtual] += torch.cat([one.to(device, wide).flatten() for one in values])
        work = self._world.total(table)
        if work is not None:
            work.wait()
        return table

    def _combined(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        if self._starts[0][index].values.is_floating_point():
            mean = list(rows.clone())
            for one, other in additions([Node(0, virtual) for virtual in range(len(mean))]):
                mean[one] += mean[other]
            # A third of the sum of three equal numbers may be another number.
            return torch.where((rows == rows[0]).all(0), rows[0], mean[0] / len(mean))
        most = rows.amax(0)
        if not self._counts_batches(index) and not bool((rows == most).all()):
            raise TaskError(
                f"forward changes the buffer {self._names[index]}, whose whole numbers differ between virtual replicas "
                "and cannot be averaged: with --replicas, keep floats there, or keep it out of the model"
            )
        return most

    def _counts_batches(self, index: int) -> bool:
        """In a short batch, virtual replicas may have different numbers of micro-batches."""
        owner, key = self._slots[0][index]
        return isinstance(owner, NormBase) and key == "num_batches_tracked"

    def _refuse_shape(self, index: int, values: torch.Tensor) -> None:
        if values.shape != self._starts[0][index].values.shape or values.is_complex():
            raise TaskError(
                f"forward changes the shape of the buffer {self._names[index]}, or it is complex: with --replicas, "
                "whose virtual replicas' buffers are averaged, keep it out of the model"
            )


_KNOWN: WeakKeyDictionary[DistributedModel, ReplicaBuffers] = WeakKeyDictionary()


def replica_buffers(model: DistributedModel, world: World) -> ReplicaBuffers:
    """Those of a model, from step to step."""
    if model not in _KNOWN:
        _KNOWN[model] = ReplicaBuffers(model, world)
    return _KNOWN[model]


def _slots(model: nn.Module) -> dict[str, Slot]:
    return {
        f"{prefix}.{key}": Slot(layer, key)
        for prefix, layer in model.named_modules()
        for key, _ in layer.named_buffers(recurse=False)
    }


def _is_written(slot: Slot) -> bool:
    return isinstance(slot.owner, NormBase)
