"""All-reduce between the processes of one machine, through shared memory: of gradients (allreduce.c), and of scalars.

For gradients (`Channel`), each process has a ring of slots. The tensors are treated as one flat buffer and cut into
chunks of a slot's size, so that what one process writes is still in the cache when another reads it. Every chunk passes
through three stages, each in order:

    post     scale the chunk into this process's slot, once all processes have released that slot
    reduce   each process sums its share of the chunk over all slots and puts the sum into its own slot
    collect  copy the sums of the other shares out of the other processes' slots

A single small chunk skips the second stage: each process sums all of it, in rank order. The progress of a process in
each stage is a counter that only this process writes. Without the C library, DDP averages gradients over gloo.

A few numbers, such as a loss and its count, are posted now and read later (`ScalarAllReduce`), in Python.
"""

from __future__ import annotations

import ctypes
import platform
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from evenstep.distributed.shm.segment import LOOK_SECONDS, Gather, Shared, share

if TYPE_CHECKING:
    from evenstep.distributed.gradient_tree import Layout

SMALL_BYTES = 2**16
"""Up to this size, a second round of waiting costs more than summing everything on every process."""
LINE = 16
"""Distance between two counters, in units of 8 bytes: no two share a cache line, or a pair of cache lines."""
LINES = 4
"""Per process: three counters, and a futex that the C code sleeps on."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""The dtypes that allreduce.c can add, in the order of its codes."""
TO_FIRST, FROM_FIRST = 1, 2
"""The directions that allreduce.c knows."""


@dataclass(frozen=True)
class Ring:
    """The layout of the memory: the counters of all processes, then the slots of each."""

    num_slots: int
    slot_bytes: int

    @classmethod
    def of(cls, num_bytes: int, slot_bytes: int, most_slots: int) -> Ring:
        """For tensors of `num_bytes` in total: room for two steps, so that no process waits for the previous one."""
        slot_bytes = min(slot_bytes, max(1, -(-num_bytes // 4096)) * 4096)
        return cls(max(2, min(most_slots, 2 * -(-num_bytes // slot_bytes))), slot_bytes)

    def num_bytes(self, size: int) -> int:
        """Of all processes together."""
        return size * (8 * LINES * LINE + self.num_slots * self.slot_bytes)


SLOTS = (2**18, 8)
"""Bytes of a slot, and the maximum number of slots: a chunk fits one core's cache, a ring the shared one."""
BACKGROUND_SLOTS = (2**18, 32)


def open_channel(
    gather: Gather, rank: int, num_bytes: int, library: ctypes.CDLL | None, *, is_background: bool = False
) -> Channel | None:
    """A channel for tensors of `num_bytes` in total; None on every process if one of them cannot open it.

    `library` is the result of `native.load`. In the background, while other threads compute, nobody spins, and there
    are slots for two tensors: who posts does not wait for who is still computing.
    """
    able = gather(library is not None)
    if not all(able) or library is None:
        return None
    ring = Ring.of(num_bytes, *(BACKGROUND_SLOTS if is_background else SLOTS))
    shared = share(gather, rank, ring.num_bytes(len(able)))
    return Channel(shared, ring, library, may_spin=not is_background) if shared is not None else None


class Channel:
    """One process's end of an all-reduce of gradients."""

    def __init__(self, shared: Shared, ring: Ring, library: ctypes.CDLL, *, may_spin: bool = True) -> None:
        self._peers, self._library = shared.peers, library
        self._memory = shared.memory
        self._handle = library.evenstep_open(
            self._memory.data_ptr(),
            *(shared.rank, shared.size, ring.num_slots, ring.slot_bytes, SMALL_BYTES),
            may_spin and shared.peers.may_spin,
        )
        if not self._handle:
            raise MemoryError
        self._one: tuple[array[int], array[int]] | None = None
        """Where the tensor is that is copied or summed one way; C reads it until that is done."""

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.evenstep_close(self._handle)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Average tensors of one dtype in place; all processes call this. Each tensor fills its memory without gaps.

        After an interrupted call the channel cannot be used again: the other processes are in the middle of it.
        """
        pointers = array("Q", [tensor.data_ptr() for tensor in tensors])
        ends = array("q", accumulate(tensor.numel() for tensor in tensors))
        self._library.evenstep_begin(
            *(self._handle, pointers.buffer_info()[0], ends.buffer_info()[0], len(ends)),
            DTYPES.index(tensors[0].dtype),
        )
        self.finish()

    def begin_sum_to_first(self, tensor: torch.Tensor) -> bool:
        """Add the tensors of all processes to that of the first, as far as that needs no waiting; whether it is done.

        The others may go on before the first has their tensors. What is not done, `finish` does.
        """
        self._begin_one_way(tensor, TO_FIRST)
        return bool(self._library.evenstep_advance(self._handle, 0.0))

    def copy_from_first(self, tensor: torch.Tensor) -> None:
        """Copy the first process's tensor into those of the others, for which it does not wait."""
        self._begin_one_way(tensor, FROM_FIRST)
        self.finish()

    def _begin_one_way(self, tensor: torch.Tensor, direction: int) -> None:
        pointer, end = self._one = array("Q", [tensor.data_ptr()]), array("q", [tensor.numel()])
        self._library.evenstep_begin_one_way(
            *(self._handle, pointer.buffer_info()[0], end.buffer_info()[0], 1, DTYPES.index(tensor.dtype), direction)
        )

    def sum_tree(self, nodes: Sequence[Sequence[torch.Tensor]], into: Sequence[torch.Tensor], layout: Layout) -> None:
        """Sum the nodes of all processes in the order of a tree, `into` tensors that may be those of one node.

        Each node has the same tensors as any other. All processes call this with the same layout.
        """
        rows = [*nodes, into]
        pointers = array("Q", [tensor.data_ptr() for row in rows for tensor in row])
        ends = array("q", accumulate(tensor.numel() for tensor in into))
        tree = array("q", layout.numbers)
        if not self._library.evenstep_begin_tree(
            *(self._handle, pointers.buffer_info()[0], len(nodes), ends.buffer_info()[0], len(ends)),
            *(DTYPES.index(into[0].dtype), tree.buffer_info()[0]),
        ):
            raise MemoryError
        self.finish()

    def finish(self) -> None:
        """Wait until all is done that was begun."""
        began = time.perf_counter()
        # In slices: between two of them Python handles signals, and a process that has ended is detected.
        while not self._library.evenstep_advance(self._handle, LOOK_SECONDS):
            lost = self._peers.lost()
            # What it posted before it ended counts.
            if not self._library.evenstep_advance(self._handle, 0.0):
                self._peers.judge(lost, time.perf_counter() - began)


MAX_NUMBERS = 256
"""Such as the loss of each virtual replica."""
DEPTH = 4
"""Sums that may be pending at once."""


class ScalarAllReduce:
    """One process's end of a scalar all-reduce: every process has a slot for each pending sum, and two counters."""

    most_numbers = MAX_NUMBERS

    def __init__(self, shared: Shared) -> None:
        self._rank, self._peers = shared.rank, shared.peers
        size = shared.size
        self._counts = shared.counters(2 * LINE * size)
        # Python floats: for a few numbers, tensors would take ten times as long.
        self._slots: memoryview[float] = shared.memory.numpy().data[16 * LINE * size :].cast("d")
        self._posted = [2 * LINE * rank for rank in range(size)]
        self._read = [2 * LINE * rank + LINE for rank in range(size)]
        self._num_posted = 0
        self._num_read = 0

    @classmethod
    def open(cls, gather: Gather, rank: int, size: int) -> ScalarAllReduce | None:
        """For all processes that gather; None if they are not on one machine."""
        if not all(gather(stores_are_ordered())):
            return None
        shared = share(gather, rank, 8 * size * (2 * LINE + DEPTH * MAX_NUMBERS))
        return cls(shared) if shared is not None else None

    def takes(self, values: torch.Tensor) -> bool:
        """Whether these values fit; the other processes have the same dtype and shape."""
        return values.dtype is torch.float64 and values.device.type == "cpu" and values.numel() <= MAX_NUMBERS

    def post(self, numbers: Sequence[float]) -> PendingSum:
        """Post this process's numbers; the sums are read later."""
        number = self._num_posted
        if number >= DEPTH:
            # A sum that is never read, because the program continued after an error, must not block later ones.
            self._mark_read(number - DEPTH)
            self._wait(self._read, number - DEPTH)
        start = self._start(number, self._rank)
        for place, value in enumerate(numbers, start):
            self._slots[place] = value
        self._num_posted = number + 1
        self._counts[self._posted[self._rank]] = number + 1
        return PendingSum(self, number, len(numbers))

    def post_tensor(self, values: torch.Tensor) -> PendingTensorSum:
        """Post a tensor, into which the sums are copied."""
        return PendingTensorSum(self.post(values.reshape(-1).tolist()), values)

    def fetch(self, number: int, length: int) -> list[float]:
        """Wait for the sums with this number."""
        self._wait(self._posted, number)
        # Not sum(), which compensates rounding: plain additions in rank order, the same on every process.
        sums = [0.0] * length
        for rank in range(len(self._posted)):
            row = self._slots[self._start(number, rank) :][:length]
            sums = [one + other for one, other in zip(sums, row, strict=True)]
        self._mark_read(number)
        return sums

    def _start(self, number: int, rank: int) -> int:
        return (number % DEPTH * len(self._posted) + rank) * MAX_NUMBERS

    def _mark_read(self, number: int) -> None:
        self._num_read = max(self._num_read, number + 1)
        self._counts[self._read[self._rank]] = self._num_read

    def _wait(self, places: list[int], number: int) -> None:
        counts = self._counts
        self._peers.wait(lambda: all(counts[place] > number for place in places))


class PendingSum:
    """The sums of a few numbers, still pending."""

    def __init__(self, scalars: ScalarAllReduce, number: int, length: int) -> None:
        self._scalars = scalars
        self._number = number
        self._length = length

    def read(self) -> list[float]:
        """Wait until all processes have posted their numbers."""
        return self._scalars.fetch(self._number, self._length)


class PendingTensorSum:
    """The same for a tensor, with the `wait` of torch's Work."""

    def __init__(self, pending: PendingSum, values: torch.Tensor) -> None:
        self._pending = pending
        self._values = values

    def wait(self) -> None:
        """Copy the sums into the tensor."""
        self._values.copy_(torch.tensor(self._pending.read(), dtype=torch.float64).view(self._values.shape))


def stores_are_ordered() -> bool:
    """Whether other cores see Python's writes in program order; Python has no memory barriers."""
    return platform.machine() in ("x86_64", "AMD64")
