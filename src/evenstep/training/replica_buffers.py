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
from evenstep.private_apis import NormBase, flatten_dense_tensors, foreach_copy_, unflatten_dense_tensors, version_of
from evenstep.strategies.base import DistributedModel


class Slot(NamedTuple):
    """Where a model keeps a buffer; a module may put another tensor there."""

    owner: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        # `owner.key` alone looks in three dictionaries first.
        found = self.owner._buffers.get(self.key)
        return found if found is not None else getattr(self.owner, self.key)


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
                f"{name or 'the model'} is a SyncBatchNorm, and with --virtual-replicas a virtual replica is computed "
                "without the others; use nn.BatchNorm2d, which normalizes by the samples of its virtual replica"
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
        self._groups: list[list[int]] = []
        """Those that forward changes, as far as all ranks know; of one kind each, so that one kernel copies them."""
        self._written: set[int] = set()
        self._add([index for index, slot in enumerate(self._slots[0]) if isinstance(slot.owner, NormBase)])
        self._starts: list[dict[int, BufferStart]] = [{} for _ in slots]
        self._is_used = [False for _ in slots]
        """Whether a virtual replica has run on the replica in this step."""
        self._rows: dict[int, torch.Tensor] = {}
        """What each virtual replica of this process made of the groups, as one row."""
        self._new: dict[int, dict[int, torch.Tensor]] = {}
        """What it made of others."""
        self._ended: set[int] = set()
        self._is_first = True

    def _add(self, indices: Sequence[int]) -> None:
        kinds: dict[object, list[int]] = {}
        for index in indices:
            kinds.setdefault((self._slots[0][index].tensor.dtype, self._counts_batches(index)), []).append(index)
        self._groups += kinds.values()
        self._written |= {*indices}

    @torch.no_grad()
    def start(self) -> None:
        """Before a step."""
        self._rows, self._new, self._ended = {}, {}, set()
        self._is_used = [False for _ in self._slots]
        for slots, starts in zip(self._slots, self._starts, strict=True):
            for index, slot in enumerate(slots):
                before, tensor = starts.get(index), slot.tensor
                is_kept = before is not None and before.tensor is tensor
                if not is_kept or (index not in self._written and starts[index].version != version_of(tensor)):
                    starts[index] = BufferStart(tensor, version_of(tensor), tensor.detach().clone())
            for group in self._groups:
                foreach_copy_([starts[index].values for index in group], [starts[index].tensor for index in group])

    @torch.no_grad()
    def begin(self, replica: int) -> None:
        """Before a virtual replica: the buffers are those before the step."""
        if self._is_used[replica]:
            self._restore(replica)
        self._is_used[replica] = True

    def _restore(self, replica: int) -> None:
        starts = self._starts[replica]
        for index, start in starts.items():
            slot = self._slots[replica][index]
            if slot.tensor is not start.tensor:
                setattr(slot.owner, slot.key, start.tensor)
            if index not in self._written and version_of(start.tensor) != start.version:
                start.tensor.copy_(start.values)
        for group in self._groups:
            foreach_copy_([starts[index].tensor for index in group], [starts[index].values for index in group])

    @torch.no_grad()
    def undo(self) -> None:
        """After a step that failed: the buffers are those before it."""
        for replica, starts in enumerate(self._starts):
            self._restore(replica)
            for start in starts.values():
                # Not all that changes a buffer counts as a change.
                start.tensor.copy_(start.values)

    @torch.no_grad()
    def end(self, replica: int, virtual: int) -> None:
        """After a virtual replica."""
        self._ended.add(virtual)
        slots, starts = self._slots[replica], self._starts[replica]
        for index in self._written:
            if slots[index].tensor is not starts[index].tensor:
                self._refuse_shape(index, slots[index].tensor)
        found = [self._row([slots[index].tensor for index in group]) for group in self._groups]
        if found:
            self._rows[virtual] = torch.cat(found)
        others = {index: slots[index].tensor for index in starts if index not in self._written}
        changed = {index: tensor for index, tensor in others.items() if self._is_changed(tensor, starts[index])}
        if changed:
            self._new[virtual] = {index: tensor.detach().clone() for index, tensor in changed.items()}

    def _row(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        row = flatten_dense_tensors(tensors)
        return row.to(torch.float32 if row.device.type == "mps" else torch.float64)

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
            self._restore(replica)
        self._is_first = False
        if not self._groups:
            return
        sizes = [sum(self._starts[0][index].values.numel() for index in group) for group in self._groups]
        columns = self._table(sum(sizes))[:num_present].split(sizes, dim=1)
        for group, rows in zip(self._groups, columns, strict=True):
            combined = self._combined(group, rows)
            for starts in self._starts:
                targets = [starts[index].tensor for index in group]
                foreach_copy_(targets, unflatten_dense_tensors(combined.to(targets[0]), targets))

    def _learn(self) -> None:
        """Agree with all ranks on the buffers that forward changes; usually those of BatchNorm, known before."""
        if len(self._written) == len(self._names):
            return
        new = {index for changed in self._new.values() for index in changed}
        flag = torch.full((), float(len(new)), dtype=torch.float64)
        work = self._world.total(flag)
        if work is not None:
            work.wait()
        if not flag.item():
            return
        found = sorted({index for of_rank in self._world.gather(sorted(new)) for index in of_rank})
        num_known = len(self._groups)
        self._add(found)
        for virtual in self._ended:
            changed = self._new.get(virtual, {})
            for index, tensor in changed.items():
                self._refuse_shape(index, tensor)
            rows = [
                self._row([changed.get(index, self._starts[0][index].values) for index in group])
                for group in self._groups[num_known:]
            ]
            self._rows[virtual] = torch.cat([*([self._rows[virtual]] if num_known else []), *rows])

    def _table(self, width: int) -> torch.Tensor:
        """What each virtual replica made of the buffers, one row for each, on every rank."""
        device = self._starts[0][self._groups[0][0]].values.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        table = torch.zeros(self._world.num_virtual or 0, width, dtype=wide, device=device)
        for virtual, row in self._rows.items():
            # Added to the zeros, on one device as on several.
            table[virtual] += row.to(device)
        work = self._world.total(table)
        if work is not None:
            work.wait()
        return table

    def _combined(self, group: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        if self._starts[0][group[0]].values.is_floating_point():
            mean = list(rows.clone())
            for one, other in additions([Node(0, virtual) for virtual in range(len(mean))]):
                mean[one] += mean[other]
            # A third of the sum of three equal numbers may be another number.
            return torch.where((rows == rows[0]).all(0), rows[0], mean[0] / len(mean))
        most = rows.amax(0)
        if not self._counts_batches(group[0]) and not bool((rows == most).all()):
            names = ", ".join(self._names[index] for index in group)
            raise TaskError(
                f"forward changes the buffer {names}, whose whole numbers differ between virtual replicas and cannot "
                "be averaged: with --virtual-replicas, keep floats there, or keep it out of the model"
            )
        return most

    def _counts_batches(self, index: int) -> bool:
        """In a short batch, virtual replicas may have different numbers of micro-batches."""
        owner, key = self._slots[0][index]
        return isinstance(owner, NormBase) and key == "num_batches_tracked"

    def _refuse_shape(self, index: int, values: torch.Tensor) -> None:
        if values.shape != self._starts[0][index].values.shape or values.is_complex():
            raise TaskError(
                f"forward changes the shape of the buffer {self._names[index]}, or it is complex: with "
                "--virtual-replicas, whose virtual replicas' buffers are averaged, keep it out of the model"
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
