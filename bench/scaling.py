"""Two ranks on two cores against one rank on one core: the tutorials' two networks, an MLP of 10M, a small GPT.

python bench/scaling.py [--quick] [--out FILE]

One rank is the raw loop with a fused optimizer, which carries none of our cost. Two ranks are ours, with the batch of
the one rank (each has half of it) and with twice that. All take their blocks in turn in the same two processes; while
one rank computes alone, the other waits. Exposed is what a step of two ranks takes beyond the same step that sends
nothing, run by both at once: a ceiling that already has what two cores lose by sharing their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import harness
import peers
import torch
from harness import Plain, Result
from models import CIFAR_NET, MLP_10M, SIMPLE_NET, SMALL_GPT, Work
from peers import Place

import evenstep

WORKS = {SIMPLE_NET: 50, CIFAR_NET: 15, MLP_10M: 4, SMALL_GPT: 5}
"""Steps of a block."""
ONE, AGAIN = "1 rank", "1 rank, again"
CASES = {"the same batch": 1, "twice the batch": 2}


def on_rank(work: Work, steps: int, rounds: int) -> dict[str, list[float]]:
    """Called in both ranks: milliseconds of every block."""
    torch.set_num_threads(1)
    team = evenstep.join("ddp", ("cpu", "cpu"))
    place = Place(team.world.rank, team.world.size)
    is_first = place.rank == 0
    runs: dict[str, Callable[[int], object]] = {
        name: peers.raw(work, Place(), True).run if is_first else _wait for name in (ONE, AGAIN)
    }
    for case, times in CASES.items():
        larger = replace(work, batch=work.batch * times)
        runs[case] = peers.ours(team, larger, True).run
        runs[f"{case}, nothing sent"] = peers.raw(larger, place, True).run
    blocks = {name: partial(harness.timed, run, steps, True) for name, run in runs.items()}
    for block in blocks.values():
        block()
    return harness.interleaved(blocks, rounds)


def _wait(num: int) -> None:
    """The next block begins with a barrier."""


def rows_of(work: Work, figures: dict[str, list[float]]) -> tuple[list[list[str]], dict[str, float]]:
    """A row for each case, and the speed-ups."""
    rows, speed_ups = [], {}
    alone = figures[ONE]
    control = harness.compared(alone, figures[AGAIN])
    for case, times in CASES.items():
        found = harness.compared([ms / times for ms in figures[case]], alone)
        silent = figures[f"{case}, nothing sent"]
        ceiling = harness.compared([ms / times for ms in silent], alone)
        exposed = median(whole - bare for whole, bare in zip(figures[case], silent, strict=True))
        whole = median(figures[case])
        speed_ups[f"{work.name.split(',')[0]}: {case}"] = found.ratio
        rows.append(
            [
                work.name,
                case,
                harness.number(median(alone)),
                harness.number(whole),
                f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})",
                f"{ceiling.ratio:.2f}",
                f"{harness.number(exposed)} ({exposed / whole:.0%})".replace("%", " %"),
                f"{control.low:.3f} to {control.high:.3f}",
            ]
        )
    return rows, speed_ups


def measure(quick: bool) -> Result:
    rows, headline = [], {}
    for work, steps in ({SIMPLE_NET: 15} if quick else WORKS).items():
        found: list[Any] = harness.on_ranks(on_rank, work, steps, 3 if quick else 12)
        more, speed_ups = rows_of(work, harness.slowest(found))
        rows += more
        headline |= speed_ups
    heads = ["work", "2 ranks have", "1 rank, ms", "2 ranks, ms", "speed-up (95 %), ideal 2", "if nothing were sent"]
    heads += ["exposed, ms", "control"]
    table = Plain("2 ranks on 2 cores against 1 rank on 1 core", heads, rows)
    goal = "as near to 2 as a step that sends nothing comes"
    return Result("scaling", "scaling on this machine", goal, tables=[table], headline=headline)


def main() -> None:
    given = harness.parser(__doc__).parse_args()
    harness.finish(measure(given.quick), given.out)


if __name__ == "__main__":
    main()
