"""What virtual replicas cost: a step with V = 4 beside plain accumulation into 4 micro-batches, one device, one thread.

python bench/virtual_replicas.py [OUT.json]

Both run in one process, by turns, and so does a second copy of the plain one: no claim smaller than its spread. Freed
memory is kept for both; alone, plain accumulation returns it to the system, and is slower than here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict

import harness
import torch
from models import WORKS, Work

import evenstep
from evenstep.training.team import Team

V = 4
ROUNDS, STEPS = 15, 10


def block(work: Work, team: Team, accumulate: int) -> harness.Block:
    """Milliseconds of a step."""
    model = team.wrap(work.model())
    optimizer = work.optimizer(model.module, is_fused=True)
    loader = team.loader(work.columns(), work.batch, accumulate=accumulate)

    def endless() -> Iterator[object]:
        while True:
            yield from loader

    batches = endless()

    def steps(num: int) -> None:
        for _ in range(num):
            team.backward(work.loss, model, next(batches))
            team.step(optimizer)

    steps(STEPS)
    return lambda: harness.timed(steps, STEPS)


def main() -> None:
    virtual = evenstep.join("single", ["cpu"], virtual_replicas=V)
    plain = evenstep.join("single", ["cpu"])
    torch.set_num_threads(1)
    results = {}
    for work in WORKS:
        blocks = {"plain": block(work, plain, V), "virtual": block(work, virtual, 1), "again": block(work, plain, V)}
        figures = harness.interleaved(blocks, ROUNDS)
        found = {name: harness.compared(figures["plain"], figures[name]) for name in ("virtual", "again")}
        results[work.name] = {name: asdict(one) for name, one in found.items()}
        for name, one in found.items():
            label = "V = 4" if name == "virtual" else "control"
            print(
                f"{work.name:<42} {label:<8} {one.second:8.3f} ms, {one.ratio:.3f} x ({one.low:.3f} to {one.high:.3f})"
            )
    if len(sys.argv) > 1:
        harness.write(sys.argv[1], "python bench/virtual_replicas.py", results)


if __name__ == "__main__":
    main()
