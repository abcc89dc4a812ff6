"""A few numbers of every process, added up: posted now, read later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evenstep.distributed.shm.allreduce import LINE, stores_are_ordered
from evenstep.distributed.shm.segment import Gather, Shared, share

MAX_NUMBERS = 64
DEPTH = 4
"""Letters that may be on their way at once."""


class Mailbox:
    """Of one process: every process has a slot for each letter on its way, and two counters."""

    def __init__(self, shared: Shared) -> None:
        self._rank, self._peers = shared.rank, shared.peers
        size = shared.size
        self._counts = shared.counters(2 * LINE * size)
        # Python's own floats: for a few numbers, tensors would take ten times as long.
        self._slots: memoryview[float] = shared.memory.numpy().data[16 * LINE * size :].cast("d")
        self._posted = [2 * LINE * rank for rank in range(size)]
        self._read = [2 * LINE * rank + LINE for rank in range(size)]
        self._num_posted = 0
        self._num_read = 0

    @classmethod
    def open(cls, gather: Gather, rank: int, size: int) -> Mailbox | None:
        """One for all processes that gather; None if they do not share a machine."""
        if not all(gather(stores_are_ordered())):
            return None
        shared = share(gather, rank, 8 * size * (2 * LINE + DEPTH * MAX_NUMBERS))
        return cls(shared) if shared is not None else None

    def takes(self, values: torch.Tensor) -> bool:
        """Whether they fit; the others have values of the same type and shape."""
        return values.dtype is torch.float64 and values.device.type == "cpu" and values.numel() <= MAX_NUMBERS

    def post(self, numbers: Sequence[float]) -> Letter:
        """Send a few numbers; the letter knows their sums later."""
        number = self._num_posted
        if number >= DEPTH:
            # One that nobody here will read, after an error that the program went on from, holds up nobody.
            self._mark_read(number - DEPTH)
            self._wait(self._read, number - DEPTH)
        start = self._start(number, self._rank)
        for place, value in enumerate(numbers, start):
            self._slots[place] = value
        self._num_posted = number + 1
        self._counts[self._posted[self._rank]] = number + 1
        return Letter(self, number, len(numbers))

    def fetch(self, number: int, length: int) -> list[float]:
        """The sums of all processes' letter of this number; waits for it."""
        self._wait(self._posted, number)
        # Not sum(), which corrects what it rounds: as all do it, in the order of ranks.
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


class Letter:
    """A few numbers on their way."""

    def __init__(self, mailbox: Mailbox, number: int, length: int) -> None:
        self._mailbox = mailbox
        self._number = number
        self._length = length

    def read(self) -> list[float]:
        """Their sums, once all processes have posted theirs."""
        return self._mailbox.fetch(self._number, self._length)


class Sums:
    """A letter for whoever has a tensor; it can be waited for, as torch's own Work."""

    def __init__(self, letter: Letter, values: torch.Tensor) -> None:
        self._letter = letter
        self._values = values

    def wait(self) -> None:
        """Put the sums in the tensor's place."""
        self._values.copy_(torch.tensor(self._letter.read(), dtype=torch.float64).view(self._values.shape))
