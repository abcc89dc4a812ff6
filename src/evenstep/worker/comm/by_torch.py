"""A channel whose work is done by torch, a pass over memory for each operation, where there is no C part."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from evenstep.worker.comm.channel import LINE, LINES, SMALL_BYTES, Ring
from evenstep.worker.comm.memory import Shared

SLOTS = (2**20, 8)
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
