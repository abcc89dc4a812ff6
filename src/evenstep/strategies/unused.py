"""Parameters that a step does not use: ranks agree which have a gradient anywhere.

A parameter that one rank used and another did not has a gradient, to which the other rank adds zeros. One that no rank
used has `.grad = None` afterwards, as on one device, and the optimizer leaves it alone: no weight decay, no momentum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evenstep.distributed.world import World

SHOWN = 3
"""Names of a message."""


def negative_zeros(weight: torch.Tensor) -> torch.Tensor:
    """What a rank adds to a gradient that it does not have; it changes no number, and not even the sign of a zero."""
    return torch.full_like(weight, -0.0)


def are_negative_zeros(gradients: Sequence[torch.Tensor]) -> list[bool]:
    """For each sum over ranks, whether no rank had a gradient: numbers that were added give +0.0 at least once."""
    if not gradients:
        return []
    untouched = [((one == 0) & one.signbit()).all() for one in gradients]
    return [bool(one) for one in torch.stack(untouched).tolist()]


class UnusedParameters:
    """Of one model: finds which parameters no rank used, with as few messages as possible.

    A rank that used all of them knows that each has a gradient. So ranks ask each other in the first step, and in
    every later one if some parameter was unused in it. A rank that first misses one in a later step finds negative
    zeros where no other rank had a gradient either.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], world: World, cost: str) -> None:
        self.names = [name for name, _ in named]
        self.notes: list[str] = []
        """What to log; the reader clears it."""
        self._world = world
        self._cost = cost
        self._asks = True
        self._is_noted = False

    def nowhere(self, lacking: list[int], reduced: Sequence[torch.Tensor]) -> list[int]:
        """Of those that this rank lacks, whose sums over ranks are `reduced`: the ones that all ranks lack."""
        if not self._asks or self._world.communication.is_off:
            absent = are_negative_zeros(reduced)
            return [index for index, is_absent in zip(lacking, absent, strict=True) if is_absent]
        having = torch.ones(len(self.names), dtype=torch.float64)
        having[lacking] = 0
        work = self._world.total(having)
        if work is not None:
            work.wait()
        self.note(having / self._world.size)
        self._asks = bool((having < self._world.size).any())
        return torch.nonzero(having == 0).flatten().tolist()

    def note(self, shares: torch.Tensor) -> None:
        """Say once which parameters lack a gradient on some ranks or on all; `shares` are those of ranks with one."""
        lacking = [(name, share) for name, share in zip(self.names, shares.tolist(), strict=True) if share < 0.999]
        if not lacking or self._is_noted:
            return
        self._is_noted = True
        nowhere = [name for name, share in lacking if not share]
        partly = [name for name, share in lacking if share]
        said = []
        if nowhere:
            said.append(
                f"no gradient reaches {_listed(nowhere)} ({len(nowhere)} of {len(self.names)} parameters): the "
                "optimizer leaves them alone, as on one device"
            )
        if partly:
            said.append(f"only some ranks have a gradient of {_listed(partly)}: the others add zeros")
        self.notes.append(f"in this step {'; '.join(said)}. {self._cost}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
