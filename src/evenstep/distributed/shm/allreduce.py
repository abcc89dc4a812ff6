"""Averages of tensors over the processes of one machine, through memory that they share.

Every process has a ring of slots. The tensors, one after another as if they were one, are cut into pieces of a slot's
size, so that what one process writes is still in the cache when another reads it, and every piece goes through three
stages, each in the order of pieces:

    post     scaled, into this process's slot; the slot must have been let go of by all
    reduce   each process adds up its own share of the piece, over all slots, and puts the sum into its slot
    collect  the sums of the others' shares, out of their slots

Where all is one small piece there is no second stage: everybody collects all of it and adds it up, in the order of
ranks. How far a process is in each stage is a counter that it alone writes.

A channel whose work is done in C: each stage in one pass over memory, and waiting without the interpreter.

A channel whose work is done by torch, a pass over memory for each operation, where there is no C part.
"""

from __future__ import annotations

import ctypes
import platform
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from evenstep.distributed.shm.segment import LOOK_SECONDS, Gather, Shared, share

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
    # moved
    # moved

    able = gather([library is not None, stores_are_ordered()])
    size = len(able)
    if all(has_library for has_library, _ in able) and library is not None:
        ring = Ring.of(num_bytes, *SLOTS)
        shared = share(gather, rank, ring.num_bytes(size))
        return ByC(shared, ring, library) if shared is not None else None
    if not all(is_ordered for _, is_ordered in able):
        return None
    # moved

    ring = Ring.of(num_bytes, *TORCH_SLOTS)
    shared = share(gather, rank, ring.num_bytes(size))
    return ByTorch(shared, ring) if shared is not None else None


def stores_are_ordered() -> bool:
    """Whether other cores see what Python writes in the order in which it does; there are no barriers to ask for."""
    return platform.machine() in ("x86_64", "AMD64")


SLOTS = (2**18, 8)
"""Bytes of a slot, and slots at most: a piece lies in one core's cache, a ring in that of all."""


class ByC:
    """See channel.py."""

    def __init__(self, shared: Shared, ring: Ring, library: ctypes.CDLL) -> None:
        self._peers, self._library = shared.peers, library
        self._memory = shared.memory
        self._handle = library.evenstep_open(
            self._memory.data_ptr(),
            *(shared.rank, shared.size, ring.num_slots, ring.slot_bytes, SMALL_BYTES, shared.peers.may_spin),
        )
        if not self._handle:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.evenstep_close(self._handle)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        places = array("Q", [tensor.data_ptr() for tensor in tensors])
        ends = array("q", accumulate(tensor.numel() for tensor in tensors))
        self._library.evenstep_begin(
            *(self._handle, places.buffer_info()[0], ends.buffer_info()[0], len(ends)),
            DTYPES.index(tensors[0].dtype),
        )
        began = time.perf_counter()
        # Slices: between two of them Python sees signals, and a process that has ended is noticed.
        while not self._library.evenstep_advance(self._handle, LOOK_SECONDS):
            lost = self._peers.lost()
            # What it posted before its end counts.
            if not self._library.evenstep_advance(self._handle, 0.0):
                self._peers.judge(lost, time.perf_counter() - began)


TORCH_SLOTS = (2**20, 8)
"""Bytes of a slot, and slots at most: larger than in C, for every piece costs some 20 microseconds of Python."""
SHARE = 64
"""Shares begin at a multiple of so many numbers, as in sums.c."""


class ByTorch:
    """See channel.py."""

    def __init__(self, shared: Shared, ring: Ring) -> None:
        self._rank, self._size, self._peers = shared.rank, shared.size, shared.peers
        self._num_slots, self._slot_bytes = ring.num_slots, ring.slot_bytes
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        header = 8 * LINES * LINE * self._size
        self._counts = shared.counters(header // 8)
        self._rings = shared.memory[header:].view(self._size, self._num_slots, self._slot_bytes)
        self._posted, self._reduced, self._collected = (
            [(LINES * rank + stage) * LINE for rank in self._others] for stage in range(3)
        )
        self._mine = LINES * LINE * self._rank
        # Pieces, over the whole life of this channel.
        self._end = self._num_posted = self._num_reduced = self._num_collected = 0
        self._pieces: deque[torch.Tensor] = deque()
        """Those that are not collected yet."""
        self._is_small = False

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        flats = [tensor.detach().view(-1) for tensor in tensors]
        row = flats[0] if len(flats) == 1 else torch.cat(flats)
        self._is_small = row.nbytes <= SMALL_BYTES
        self._pieces.extend(row.split(self._slot_bytes // row.element_size()) if len(row) else ())
        self._end += len(self._pieces)
        while self._num_collected < self._end:
            self._peers.wait(self._move)
        if len(flats) > 1:
            torch._foreach_copy_(flats, list(row.split([len(flat) for flat in flats])))

    def _move(self) -> bool:
        """Take every stage that the others have come far enough for; whether there was one."""
        has_moved = False
        while self._post() + self._reduce() + self._collect():
            has_moved = True
        return has_moved

    def _post(self) -> bool:
        number = self._num_posted
        before = number - self._num_slots
        if number == self._end or self._num_collected <= before or not self._have(self._collected, before):
            return False
        piece = self._pieces[number - self._num_collected]
        piece.mul_(1.0 / self._size)
        self._slot(self._rank, number, piece).copy_(piece)
        self._num_posted = self._counts[self._mine] = number + 1
        return True

    def _reduce(self) -> bool:
        number = self._num_reduced
        if number == self._num_posted:
            return False
        if not self._is_small:
            if not self._have(self._posted, number):
                return False
            piece = self._pieces[number - self._num_collected]
            share = self._share(self._rank, len(piece))
            self._sum(number, piece, share)
            self._slot(self._rank, number, piece)[share] = piece[share]
        self._num_reduced = self._counts[self._mine + LINE] = number + 1
        return True

    def _collect(self) -> bool:
        number = self._num_collected
        if number == self._num_reduced:
            return False
        if not self._have(self._posted if self._is_small else self._reduced, number):
            return False
        piece = self._pieces[0]
        if self._is_small:
            self._sum(number, piece, slice(None))
        else:
            for rank in self._others:
                share = self._share(rank, len(piece))
                piece[share] = self._slot(rank, number, piece)[share]
        self._pieces.popleft()
        self._num_collected = self._counts[self._mine + 2 * LINE] = number + 1
        return True

    def _sum(self, number: int, piece: torch.Tensor, share: slice) -> None:
        """In the order of ranks: the same bits whoever does it."""
        first, second, *more = (self._slot(rank, number, piece)[share] for rank in range(self._size))
        total = torch.add(first, second, out=piece[share])
        for slot in more:
            total.add_(slot)

    def _have(self, places: list[int], number: int) -> bool:
        """Whether all others have come past the piece of this number."""
        return all(self._counts[place] > number for place in places)

    def _share(self, rank: int, length: int) -> slice:
        """What a process adds up of a piece."""
        most = -(-length // (SHARE * self._size)) * SHARE
        return slice(min(length, rank * most), min(length, (rank + 1) * most))

    def _slot(self, rank: int, number: int, piece: torch.Tensor) -> torch.Tensor:
        """Where a process puts this piece."""
        return self._rings[rank, number % self._num_slots].view(piece.dtype)[: len(piece)]
