"""`evenstep.log` in a loss: its values are summed over micro-batches and devices, and divided by their counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from evenstep.distributed.world import World
from evenstep.task import Amount
from evenstep.training.host_copy import HostCopy
from evenstep.training.loss_amount import as_sum


class StepLogs:
    """What the losses of one step gave to `evenstep.log`; sums over processes travel with those of the loss.

    `names` are those that all ranks know, in one order, from step to step. Where a rank has another one, the ranks
    agree on it after the step, in two collectives more.
    """

    def __init__(self, world: World, names: list[str]) -> None:
        self.names = names
        self._sent_names = list(names)
        """Those whose sums travel with this step's loss; when it is read, more may be known."""
        self._world = world
        self._own: list[tuple[str, torch.Tensor, HostCopy | None]] = []
        self._sums: list[float] = []

    def take(self, logged: list[tuple[str, Amount]], num_samples: int) -> None:
        """Add what the loss of one micro-batch logged."""
        for name, amount in logged:
            pair = as_sum(amount, num_samples, name)
            self._own.append((name, pair, HostCopy(pair) if self._world.size == 1 else None))

    @property
    def has_new(self) -> bool:
        """Whether this rank has a name that not all know."""
        return any(name not in self._sent_names for name in self.own_names())

    @property
    def has_known(self) -> bool:
        """Whether sums of names travel with the loss."""
        return bool(self._sent_names)

    def own_names(self) -> list[str]:
        """What the losses of this rank logged."""
        return [name for name, _, _ in self._own]

    def known(self, like: torch.Tensor) -> list[torch.Tensor]:
        """[sum, count] of each name that all ranks know, on the device."""
        return self.sums_of(self._sent_names, like)

    def sums_of(self, names: list[str], like: torch.Tensor) -> list[torch.Tensor]:
        """[sum, count] of each of these names."""
        return _pairs_of(names, self._own if self._world.counts else [], like)

    def known_numbers(self) -> list[float]:
        """The same on the host."""
        return torch.cat(self.known(torch.zeros(1, dtype=torch.float64))).tolist() if self._sent_names else []

    def take_sums(self, more: list[float]) -> None:
        """What was sent beside the loss, summed over ranks; all ranks call this."""
        has_new, *self._sums = more or [0.0]
        if not has_new or self._world.communication.is_off:
            return
        every = self._world.gather(self.own_names())
        found = dict.fromkeys(name for of_rank in every for name in of_rank)
        new = [name for name in found if name not in self._sent_names]
        table = torch.cat(self.sums_of(new, torch.zeros(1, dtype=torch.float64)))
        work = self._world.total(table)
        if work is not None:
            work.wait()
        self._sums += table.tolist()
        self._sent_names += new
        self.names += [name for name in new if name not in self.names]

    def own_pairs(self) -> dict[str, list[list[float]]]:
        """[sum, count] of each part of this process, by name."""
        pairs: dict[str, list[list[float]]] = {}
        for name, _, host in self._own:
            assert host is not None
            pairs.setdefault(name, []).append(host.read())
        return pairs

    def means(self) -> dict[str, float]:
        """The mean of each name, over all that was counted; none of what no sample had."""
        if self._world.size == 1:
            return means_of(self.own_pairs()) if self._own else {}
        return means_of({name: [self._sums[2 * index : 2 * index + 2]] for index, name in enumerate(self._sent_names)})


def means_of(pairs: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """The mean of each name, from [sum, count] of all its parts.

    >>> means_of({"a": [[1.0, 2.0], [3.0, 2.0]], "b": [[0.0, 0.0]]})
    {'a': 1.0}
    """
    # Threads add their parts in any order: fsum gives the same sum in each.
    sums = {name: [math.fsum(column) for column in zip(*every, strict=True)] for name, every in pairs.items()}
    return {name: total / count for name, (total, count) in sums.items() if count}


def _pairs_of(
    names: list[str], logged: list[tuple[str, torch.Tensor, HostCopy | None]], like: torch.Tensor
) -> list[torch.Tensor]:
    """[sum, count] of each name."""
    pairs = {name: like.new_zeros(2) for name in names}
    for name, pair, _ in logged:
        if name in pairs:
            pairs[name] = pairs[name] + pair.to(like)
    return list(pairs.values())
