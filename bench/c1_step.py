"""C1: what a step costs beyond the training itself. MLP 20-64-5, batch 256, one process, one thread.

python bench/c1_step.py [--quick] [--out FILE]

The raw loop indexes tensors with a permutation, goes forward and backward, steps and clears gradients, and never looks
at the loss; the limit is the same with a fused optimizer. Peers get their batches the same way. Ours reads through
`team.loader` and goes through `team.backward` and `team.step`; "evenstep train" is the whole worker of that command,
with its Record. Lightning and Ignite own their loops: they run in threads that wait until their turn comes, in this
very process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import harness
import peers
import torch
from harness import Entry, Result
from models import MLP, Work
from peers import Place, Steps
from torch import nn

import evenstep
from evenstep.launcher.prepare import prepare
from evenstep.record import Step
from evenstep.training.trainer import perform

GOAL = 1 / 1.02
LIMIT, AGAIN, OURS, WHOLE = "raw loop, fused", "raw loop, fused, again", "evenstep, fused", "evenstep train, fused"


def whole_loop(work: Work, is_best: bool) -> Steps:
    """What `evenstep train` runs in its worker, one step after the other."""
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(work.model())
        return made[-1]

    task = evenstep.Task(
        model=model,
        train=work.columns(),
        loss=work.loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=is_best or None),
        batch=work.batch,
    )
    prepared = prepare(task, {"steps": 10**9, "threads": 1, "devices": "cpu"})
    events = _steps(perform(prepared.plan, prepared.task, prepared.folder))

    def run(num: int) -> None:
        for _ in range(num):
            next(events)

    feed = peers.Feed(work)
    return Steps(run, lambda: peers.probe(work, feed, made[-1]))


def _steps(events: Iterator[Any]) -> Iterator[Step]:
    return (event for event in events if isinstance(event, Step))


def measure(quick: bool) -> Result:
    torch.set_num_threads(1)
    team = evenstep.join("single", ("cpu",))
    alone = Place()
    racers = {
        "raw loop": peers.raw(MLP, alone, False),
        LIMIT: peers.raw(MLP, alone, True),
        AGAIN: peers.raw(MLP, alone, True),
        "evenstep": peers.ours(team, MLP, False),
        OURS: peers.ours(team, MLP, True),
    }
    frameworks, absent = peers.build(peers.FRAMEWORKS, MLP, alone)
    racers |= frameworks
    racers[WHOLE] = whole_loop(MLP, True)
    absent |= peers.learned_the_same(racers, LIMIT)
    racers = {name: racer for name, racer in racers.items() if name not in absent}

    entries = {
        OURS: Entry("ours", "best"),
        "evenstep": Entry("ours", "default"),
        WHOLE: Entry("ours", "best", goal=GOAL, against=LIMIT),
        LIMIT: Entry("limit", "best", goal=GOAL),
        AGAIN: Entry("control", "best", against=LIMIT),
        "raw loop": Entry("peer", "default", goal=GOAL),
        **{name: Entry("peer", name.split(", ")[-1], goal=1.0) for name in frameworks},
    }
    steps, rounds = (50, 5) if quick else (250, 20)
    blocks = {name: partial(harness.timed, racer.run, steps) for name, racer in racers.items()}
    race = harness.judge(MLP.name, "ms", entries, harness.interleaved(blocks, rounds), absent=absent)
    headline = {
        "ours_over_raw": harness.ours_over(race, LIMIT),
        "ours_over_raw_default": harness.ours_over(race, "raw loop"),
        "train_over_raw": next(1 / row.ratio for row in race.rows if row.name == WHOLE and row.ratio),
        "ours_over_accelerate": harness.ours_over(race, "accelerate, best"),
        "ours_over_fabric": harness.ours_over(race, "Fabric, best"),
    }
    return Result("C1", "cost of a step", "at most 1.02 x the fused raw loop", [race], headline=headline)


def main() -> None:
    given = harness.parser(__doc__).parse_args()
    with harness.in_scratch():
        result = measure(given.quick)
    harness.finish(result, given.out)


if __name__ == "__main__":
    main()
