"""C4: a step of two ranks that average gradients, one thread each: torch's DDP, accelerate, Fabric, Lightning, ours.

python bench/c4_ddp.py [--quick] [--out FILE]

All racers live side by side in the same two processes and take their blocks in turn; a block takes as long as the
slower rank. The limits send nothing: tuned DDP with torch's `noop_hook`, and no wrapper at all. DDP at its best is
gradient_as_bucket_view, static_graph, no broadcast of buffers, and a fused optimizer; so are accelerate, Fabric and
Lightning. Lightning runs in a thread that waits until its turn comes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import harness
import peers
import torch
from harness import Entry, Race, Result
from models import CIFAR_NET, MLP, MLP_10M, SIMPLE_NET, SMALL_GPT, Work
from peers import Place

import evenstep

OURS, TUNED, SILENT, BARE = "evenstep, best", "DDP, best", "DDP that sends nothing", "no wrapper, sends nothing"
FRAMEWORKS = ("accelerate", "Fabric", "Lightning")
GOALS = {MLP.name: 3.0, SIMPLE_NET.name: 2.2, MLP_10M.name: 1.4}
"""Of tuned DDP's speed, at least; elsewhere ahead is enough."""
WORKS = {MLP: 100, SIMPLE_NET: 50, CIFAR_NET: 15, MLP_10M: 4, SMALL_GPT: 6}
"""Steps of a block."""


def on_rank(work: Work, steps: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Called in every rank: the figures of every racer, and who did not race."""
    torch.set_num_threads(1)
    team = evenstep.join("ddp", ("cpu", "cpu"))
    place = Place(team.world.rank, team.world.size)
    racers = {
        OURS: peers.ours(team, work, True),
        "evenstep, default": peers.ours(team, work, False),
        TUNED: peers.ddp(work, place, True),
        "DDP, best, again": peers.ddp(work, place, True),
        "DDP, default": peers.ddp(work, place, False),
    }
    frameworks, absent = peers.build(FRAMEWORKS, work, place)
    racers |= frameworks
    absent |= peers.learned_the_same(racers, TUNED)
    racers = {name: racer for name, racer in racers.items() if name not in absent}
    for name, limit in {SILENT: peers.ddp_silent, BARE: peers.raw}.items():
        racers[name] = limit(work, place, True)
        racers[name].run(peers.NUM_COMPARED)
    blocks = {name: partial(harness.timed, racer.run, steps, True) for name, racer in racers.items()}
    return harness.interleaved(blocks, rounds), absent


def entries(work: Work) -> dict[str, Entry]:
    return {
        OURS: Entry("ours", "best"),
        "evenstep, default": Entry("ours", "default"),
        TUNED: Entry("peer", "best", goal=GOALS.get(work.name, 1.0)),
        "DDP, best, again": Entry("control", "best", against=TUNED),
        "DDP, default": Entry("peer", "default", goal=1.0),
        **{f"{name}, {level}": Entry("peer", level, goal=1.0) for name in FRAMEWORKS for level in ("default", "best")},
        SILENT: Entry("limit", "best"),
        BARE: Entry("limit", "best"),
    }


def race(work: Work, steps: int, rounds: int) -> Race:
    found: list[Any] = harness.on_ranks(on_rank, work, steps, rounds)
    figures = harness.slowest([of_rank for of_rank, _ in found])
    absent = {name: why for _, of_rank in found for name, why in of_rank.items()}
    return harness.judge(f"{work.name}, 2 ranks", "ms", entries(work), figures, absent=absent)


def measure(quick: bool) -> Result:
    chosen = {MLP: 30, SIMPLE_NET: 15} if quick else WORKS
    races = {work: race(work, steps, 4 if quick else 16) for work, steps in chosen.items()}
    headline = {
        f"{work.name.split(',')[0]}: ours_over_{key}": harness.ours_over(one, name)
        for work, one in races.items()
        for key, name in {
            "ddp_tuned": TUNED,
            "ddp_default": "DDP, default",
            "accelerate": "accelerate, best",
            "no_sync": BARE,
        }.items()
    }
    goal = "3 x tuned DDP on the MLP, 2.2 x on SimpleNet, 1.4 x on the MLP of 10M; ahead of everybody elsewhere"
    return Result("C4", "a DDP step of two ranks", goal, list(races.values()), headline=headline)


def main() -> None:
    given = harness.parser(__doc__).parse_args()
    harness.finish(measure(given.quick), given.out)


if __name__ == "__main__":
    main()
