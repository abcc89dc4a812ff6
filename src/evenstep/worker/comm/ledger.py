"""What every rank is about to do, compared before it is done.

Ranks that come to one collective with tensors of different sizes end in an abort or wait for ever. Where the sizes
happen to agree, nothing fails, and the result belongs to nobody. So each rank first writes down what it does next.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from evenstep.worker.comm.channel import stores_are_ordered
from evenstep.worker.comm.memory import Gather, Shared, share

DEPTH = 1024
"""Entries of a rank that are kept: the host of a GPU may be a whole step ahead of another one."""


@dataclass(frozen=True)
class Other:
    """What another rank wrote."""

    rank: int
    entry: int


class Ledger(Protocol):
    """One rank's end."""

    waits: bool
    """Whether every entry takes a round trip, in which all ranks wait for each other."""

    def differing(self, entry: int) -> Other | None:
        """Write the next entry; a rank that wrote another one in the same place, if there is any."""


def open_ledger(gather: Gather, rank: int) -> Ledger:
    """One for all ranks that gather: in memory where they share a machine, else by a collective of 8 bytes."""
    size = len(able := gather(stores_are_ordered()))
    shared = share(gather, rank, 16 * DEPTH * size) if all(able) else None
    return SharedLedger(shared) if shared is not None else SentLedger(rank, size)


class SharedLedger:
    """Waits for nobody: of two ranks that differ, the one that comes later finds the other's entry."""

    waits = False

    def __init__(self, shared: Shared) -> None:
        self._numbers = shared.counters(2 * DEPTH * shared.size)
        self._own = 2 * DEPTH * shared.rank
        self._others = [(rank, 2 * DEPTH * rank) for rank in range(shared.size) if rank != shared.rank]
        self._num_written = 0
        self._fence = threading.Lock()

    def differing(self, entry: int) -> Other | None:
        self._num_written += 1
        numbers, number, place = self._numbers, self._num_written, 2 * (self._num_written % DEPTH)
        own = self._own + place
        # Nobody reads an entry under the number of the one that it replaces.
        numbers[own] = 0
        numbers[own + 1] = entry
        numbers[own] = number
        # x86 may read the others' entries before its own are out; not across the locked instruction of a lock.
        with self._fence:
            pass
        for rank, start in self._others:
            if numbers[start + place] == number:
                theirs = numbers[start + place + 1]
                if theirs != entry and numbers[start + place] == number:
                    return Other(rank, theirs)
        return None


class SentLedger:
    """Every entry is sent to all ranks, which wait for each other."""

    waits = True

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def differing(self, entry: int) -> Other | None:
        mine = torch.tensor([entry])
        every = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(every, mine)
        others = [Other(rank, int(one)) for rank, one in enumerate(every)]
        return next((other for other in others if other.entry != entry), None)
