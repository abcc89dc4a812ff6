"""How often ranks compare what they are about to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenstep.distributed.collective_check import Other
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.strategies.fsdp import EVERY, NUM_FIRST, Agreement


class Written:
    """Keeps what is compared; another rank may have written something else."""

    def __init__(self, waits: bool) -> None:
        self.waits = waits
        self.entries: list[int] = []
        self.other: Other | None = None

    def differing(self, entry: int) -> Other | None:
        self.entries.append(entry)
        return self.other


def entries_of(ledger: Written, skipping: int | None = None) -> list[int]:
    """How many there are after each of many forwards; in one of them, a layer is skipped."""
    agreement, model = Agreement(ledger, World(0, 1, (torch.device("cpu"),))), nn.Linear(2, 2)
    gathers = agreement.gathers("layer", ["weight"])
    agreement.watch_forward(model)
    counts = []
    for number in range(2 * EVERY + 1):
        if number != skipping:
            gathers()
        model(torch.zeros(1, 2))
        counts.append(len(ledger.entries))
    return counts


def test_in_memory_every_forward_is_compared() -> None:
    assert entries_of(Written(waits=False))[-1] == 2 * (2 * EVERY + 1)


def test_between_machines_the_first_forwards_are_compared_and_then_one_of_many() -> None:
    counts = entries_of(Written(waits=True))
    assert counts[NUM_FIRST - 1] == counts[EVERY - 1] == 2 * NUM_FIRST
    assert counts[EVERY] == counts[2 * EVERY - 1] == 2 * NUM_FIRST + 2
    assert counts[2 * EVERY] == 2 * NUM_FIRST + 4


def test_a_rank_that_skips_a_layer_compares_in_the_same_forwards_as_the_others() -> None:
    """Else one would wait for a comparison that the other does not make."""
    whole, skipping = Written(waits=True), Written(waits=True)
    entries_of(whole)
    entries_of(skipping, skipping=NUM_FIRST + 1)
    assert whole.entries == skipping.entries


def test_what_differs_is_said_where_it_is_compared() -> None:
    ledger = Written(waits=True)
    ledger.other = Other(1, 2 * 2**32)
    with pytest.raises(TaskError, match=r"rank 0 runs layer \(weight\), rank 1 runs no more layers"):
        entries_of(ledger)
