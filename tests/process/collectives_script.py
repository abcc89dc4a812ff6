"""Ranks that write the same entries, more than a ledger keeps, and then different ones; `collectives_script.py OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import evenstep
from evenstep.distributed.collective_check import DEPTH, Ledger, Other, SentLedger, open_ledger


def found(ledger: Ledger, entries: list[int]) -> list[int] | None:
    others = [ledger.differing(entry) for entry in entries]
    return next(([one.rank, one.entry] for one in others if isinstance(one, Other)), None)


world = evenstep.join("ddp", devices=("cpu", "cpu")).world
shared = open_ledger(world.gather, world.rank)
for ledger in (shared, SentLedger(world.rank, world.size)):
    equal = found(ledger, list(range(2 * DEPTH + 3)))
    world.barrier()
    outcome = {"while equal": equal, "after": found(ledger, [7000 + 1000 * world.rank])}
    Path(sys.argv[1], f"{type(ledger).__name__}-{world.rank}.json").write_text(json.dumps(outcome))
    world.barrier()
