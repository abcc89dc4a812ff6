"""Parameters that a step does not use: ranks agree which have a gradient anywhere.

A parameter that one rank used and another did not has a gradient, to which the other rank adds zeros. One that no rank
used has `.grad = None` afterwards, as on one device, and the optimizer leaves it alone: no weight decay, no momentum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evenstep.distributed.shm.allreduce import stores_are_ordered
from evenstep.distributed.shm.segment import Shared, share
from evenstep.distributed.world import World

FREEZE = "Freeze what is never trained: parameter.requires_grad_(False)"
SHOWN = 3
"""Names of a message."""


def negative_zeros(weight: torch.Tensor) -> torch.Tensor:
    """What a rank adds to a gradient that it does not have; it changes no number, and not even the sign of a zero."""
    return -torch.zeros_like(weight)


def are_negative_zeros(gradients: Sequence[torch.Tensor]) -> list[bool]:
    """For each sum over ranks, whether no rank had a gradient: numbers that were added give +0.0 at least once."""
    if not gradients:
        return []
    real = [torch.view_as_real(one) if one.is_complex() else one for one in gradients]
    untouched = [((one == 0) & one.signbit()).all() for one in real]
    return [bool(one) for one in torch.stack(untouched).tolist()]


class UnusedNote:
    """Says once which parameters have no gradient, and what that costs."""

    def __init__(self, names: Sequence[str], cost: str) -> None:
        self.names = list(names)
        self.lines: list[str] = []
        """What to log; the reader clears it."""
        self._cost = cost
        self._is_said = False

    def say(self, shares: torch.Tensor) -> None:
        """`shares` are for each parameter the share of ranks that have its gradient."""
        nowhere = [name for name, share in zip(self.names, shares.tolist(), strict=True) if not share]
        partly = [name for name, share in zip(self.names, shares.tolist(), strict=True) if 0 < share < 0.999]
        if self._is_said or not (nowhere or partly):
            return
        self._is_said = True
        said = []
        if nowhere:
            said.append(
                f"no gradient reaches {_listed(nowhere)} ({len(nowhere)} of {len(self.names)} parameters): the "
                "optimizer leaves them alone"
            )
        if partly:
            said.append(f"only some ranks have a gradient of {_listed(partly)}: the others add zeros")
        self.lines.append(f"in this step {'; '.join(said)}. {self._cost}")


DEPTH = 8
"""Steps that a board keeps: the host of a GPU may be some steps ahead of another one."""


class Board:
    """Memory of one machine in which each rank writes what it lacks after each backward; reading waits for all."""

    def __init__(self, shared: Shared, num_parameters: int) -> None:
        self._num = num_parameters
        self._width = 2 + num_parameters
        self._size, self._rank, self._peers = shared.size, shared.rank, shared.peers
        self._numbers = shared.counters(DEPTH * self._size * self._width)
        self._num_written = 0

    @classmethod
    def open(cls, world: World, num_parameters: int) -> Board | None:
        """One for all ranks of this world, if they share a machine."""
        if not world.communication.may_share or not all(world.gather(stores_are_ordered())):
            return None
        shared = share(world.gather, world.rank, 8 * DEPTH * world.size * (2 + num_parameters))
        return cls(shared, num_parameters) if shared is not None else None

    def write(self, lacking: list[int]) -> None:
        """The row of this rank for the next step."""
        self._num_written += 1
        start = self._start(self._rank)
        if lacking:
            for index in range(self._num):
                self._numbers[start + 2 + index] = 0
            for index in lacking:
                self._numbers[start + 2 + index] = 1
        self._numbers[start + 1] = len(lacking)
        # Last: whoever reads this number reads the rest of the row as well.
        self._numbers[start] = self._num_written

    def num_having(self) -> torch.Tensor:
        """For each parameter, the number of ranks that have its gradient in this step."""
        starts = [self._start(rank) for rank in range(self._size)]
        self._peers.wait(lambda: all(self._numbers[start] == self._num_written for start in starts))
        having = torch.zeros(self._num, dtype=torch.int64)
        for start in starts:
            having += 1
            if self._numbers[start + 1]:
                having -= torch.tensor(self._numbers[start + 2 : start + self._width].tolist())
        return having

    def _start(self, rank: int) -> int:
        return (self._num_written % DEPTH * self._size + rank) * self._width


class UnusedParameters:
    """Of one model: finds which parameters no rank used, without a message where all are used.

    A rank that used all of them knows that each has a gradient. On one machine, a rank that lacks one reads in memory
    what the others lack. Between machines, ranks ask each other in the first step, and in every later one if
    some parameter was unused in it; a rank that first lacks one later finds negative zeros where no rank had a
    gradient. One that sees only a shard of that sum always asks.
    """

    def __init__(self, names: Sequence[str], world: World, cost: str, *, sees_sums: bool = True) -> None:
        self.note = UnusedNote(names, cost)
        self._world = world
        self._sees_sums = sees_sums
        self._board = Board.open(world, len(names)) if world.size > 1 else None
        self._asks = True

    def nowhere(self, lacking: list[int], sums: Sequence[torch.Tensor] = ()) -> list[int]:
        """The parameters that all ranks lack, if this one lacks any; `sums` are the sums over ranks of those."""
        if self._world.communication.is_off:
            return lacking
        if self._board is not None:
            self._board.write(lacking)
            if not lacking and not self._asks:
                return []
            having = self._board.num_having()
            self._asks = False
        elif self._asks or not self._sees_sums:
            having = self._ask(lacking)
        else:
            return [index for index, is_absent in zip(lacking, are_negative_zeros(sums), strict=True) if is_absent]
        self.note.say(having / self._world.size)
        return [int(index) for index in torch.nonzero(having == 0).flatten().tolist()]

    def replayed(self) -> None:
        """This rank replayed a step, in which it lacked nothing; others may not have."""
        if self._board is not None:
            self._board.write([])

    def _ask(self, lacking: list[int]) -> torch.Tensor:
        having = torch.ones(len(self.note.names), dtype=torch.float64)
        having[lacking] = 0
        work = self._world.total(having)
        if work is not None:
            work.wait()
        self._asks = bool((having < self._world.size).any())
        return having


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
