"""Averages of tensors over the processes of one machine, through memory that they share.

Every process has a ring of slots. The tensors, one after another as if they were one, are cut into pieces of a slot's
size, so that what one process writes is still in the cache when another reads it, and every piece goes through three
stages, each in the order of pieces:

    post     scaled, into this process's slot; the slot must have been let go of by all
    reduce   each process adds up its own share of the piece, over all slots, and puts the sum into its slot
    collect  the sums of the others' shares, out of their slots

Where all is one small piece there is no second stage: everybody collects all of it and adds it up, in the order of
ranks. How far a process is in each stage is a counter that it alone writes.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from evenstep.worker.comm.memory import Gather, share

SMALL_BYTES = 2**16
"""Up to here, a second round of waiting costs more than adding up what another one adds up, too."""
LINE = 16
"""Counters of 8 bytes from one to the next: no two share a cache line, or a pair of them."""
LINES = 4
"""Of each process: its three counters, and a bell that C sleeps on."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""What can be added; sums.c knows them by their place here."""


@dataclass(frozen=True)
class Ring:
    """How the memory is laid out: the counters of all, then the slots of each."""

    num_slots: int
    slot_bytes: int

    @classmethod
    def of(cls, num_bytes: int, slot_bytes: int, most_slots: int) -> Ring:
        """For tensors of so many bytes together: twice as much, so that nobody waits for the step before."""
        slot_bytes = min(slot_bytes, max(1, -(-num_bytes // 4096)) * 4096)
        return cls(max(2, min(most_slots, 2 * -(-num_bytes // slot_bytes))), slot_bytes)

    def num_bytes(self, size: int) -> int:
        """Of all processes together."""
        return size * (8 * LINES * LINE + self.num_slots * self.slot_bytes)


class Channel(Protocol):
    """One process's end."""

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Average tensors of one type in place, all processes at once; each fills its memory without gaps.

        One that was left in the middle is the last: the others are in the middle of it.
        """


def open_channel(gather: Gather, rank: int, num_bytes: int, library: ctypes.CDLL | None) -> Channel | None:
    """One for tensors of so many bytes together; None for all processes if one of them cannot have it.

    `library` is what `library.load` gave; without it, torch adds up, with the same result.
    """
    from evenstep.worker.comm.by_c import SLOTS, ByC
    from evenstep.worker.comm.by_torch import ByTorch

    able = gather([library is not None, stores_are_ordered()])
    size = len(able)
    if all(has_library for has_library, _ in able) and library is not None:
        ring = Ring.of(num_bytes, *SLOTS)
        shared = share(gather, rank, ring.num_bytes(size))
        return ByC(shared, ring, library) if shared is not None else None
    if not all(is_ordered for _, is_ordered in able):
        return None
    from evenstep.worker.comm.by_torch import SLOTS as LARGER

    ring = Ring.of(num_bytes, *LARGER)
    shared = share(gather, rank, ring.num_bytes(size))
    return ByTorch(shared, ring) if shared is not None else None


def stores_are_ordered() -> bool:
    """Whether other cores see what Python writes in the order in which it does; there are no barriers to ask for."""
    return platform.machine() in ("x86_64", "AMD64")
