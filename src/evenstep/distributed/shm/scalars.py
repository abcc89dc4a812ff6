"""All-reduce of a few numbers between the processes of one machine: posted now, read later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evenstep.distributed.shm.allreduce import LINE, stores_are_ordered
from evenstep.distributed.shm.segment import Gather, Shared, share

MAX_NUMBERS = 64
DEPTH = 4
"""Sums that may be pending at once."""


class ScalarAllReduce:
    """One process's end: every process has a slot for each pending sum, and two counters."""

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
