"""C5: a step of two ranks that share out the parameters: raw `fully_shard`, accelerate's fsdp2, ours; and peak memory.

python bench/c5_fsdp.py [--quick] [--out FILE]

All racers live side by side in the same two processes and take their blocks in turn. Every racer shards the same parts:
those that evenstep finds by itself. Memory is that of two processes of its own for each racer: what the larger of them
took beyond what it had before the model was made.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import harness
import peers
import psutil
import torch
from harness import Entry, Plain, Race, Result
from models import CIFAR_NET, MLP, MLP_10M, SIMPLE_NET, SMALL_GPT, Work
from peers import Feed, Place, Steps

import evenstep
from evenstep.strategies.fsdp import units

OURS, RAW, AGAIN, ACCELERATE = "evenstep", "fully_shard", "fully_shard, again", "accelerate, fsdp2"
WORKS = {MLP: 40, SIMPLE_NET: 30, CIFAR_NET: 10, MLP_10M: 3, SMALL_GPT: 4}
ENTRIES = {
    OURS: Entry("ours"),
    RAW: Entry("peer", goal=1.0),
    AGAIN: Entry("control", against=RAW),
    ACCELERATE: Entry("peer", goal=1.0),
}
MEMORY_STEPS = 3


def raw(work: Work, place: Place) -> Steps:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = work.model()
    mesh = init_device_mesh("cpu", (place.size,))
    for unit in units(model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return peers.looped(work, Feed(work, place), model, work.optimizer(model, True))


def accelerated(work: Work, place: Place) -> Steps:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    names = {type(unit).__name__ for unit in units(work.model())}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted(names),
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if not accelerator.is_fsdp2:
        raise RuntimeError("on the CPU accelerate 1.15 takes no notice of its fsdp_plugin, and wraps in DDP")
    model = work.model()
    model, optimizer = accelerator.prepare(model, work.optimizer(model, True))
    return peers.looped(work, Feed(work, place), model, optimizer, accelerator.backward)


def builders(work: Work) -> tuple[dict[str, Callable[[], Steps]], dict[str, str]]:
    """How each racer is made in this rank; and who is not there."""
    torch.set_num_threads(1)
    team = evenstep.join("fsdp", ("cpu", "cpu"))
    place = Place(team.world.rank, team.world.size)
    made: dict[str, Callable[[], Steps]] = {
        OURS: lambda: peers.ours(team, work, True),
        RAW: lambda: raw(work, place),
        AGAIN: lambda: raw(work, place),
    }
    if find_spec("accelerate") is None:
        return made, {ACCELERATE: "accelerate is not installed here (make bench-setup)"}
    return {**made, ACCELERATE: lambda: accelerated(work, place)}, {}


def on_rank(work: Work, steps: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Called in every rank: the figures of every racer, and who did not race."""
    made, absent = builders(work)
    racers = {}
    for name, make in made.items():
        try:
            racers[name] = make()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            if name in (OURS, RAW, AGAIN):
                raise
            absent[name] = str(error).splitlines()[0]
    absent |= peers.learned_the_same(racers, RAW)
    blocks = {
        name: partial(harness.timed, racer.run, steps, True) for name, racer in racers.items() if name not in absent
    }
    return harness.interleaved(blocks, rounds), absent


def peak_on_rank(work: Work, name: str) -> int:
    """Bytes that one racer took in this rank, at most."""
    make = builders(work)[0][name]
    before = psutil.Process().memory_info().rss
    make().run(MEMORY_STEPS)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def race(work: Work, steps: int, rounds: int) -> Race:
    found: list[Any] = harness.on_ranks(on_rank, work, steps, rounds)
    figures = harness.slowest([of_rank for of_rank, _ in found])
    absent = {name: why for _, of_rank in found for name, why in of_rank.items()}
    return harness.judge(f"{work.name}, 2 ranks", "ms", ENTRIES, figures, absent=absent)


def memory(works: list[Work], names: list[str], rounds: int) -> tuple[Plain, dict[str, float]]:
    """Peaks of each racer by turns, and ours over raw."""
    rows, ratios = [], {}
    for work in works:
        blocks = {name: partial(_peak, work, name) for name in names}
        peaks = {name: median(found) for name, found in harness.interleaved(blocks, rounds).items()}
        ratios[work.name] = peaks[OURS] / peaks[RAW]
        word = "met" if ratios[work.name] <= 1.02 else "missed"
        rows.append([work.name, *(f"{peaks[name] / 2**20:.0f}" for name in names), f"{ratios[work.name]:.3f}", word])
    heads = ["work", *(f"{name}, MiB" for name in names), "ours / raw", "goal 1.00"]
    note = "Of the larger rank, beyond what it had before; peaks of a process vary by a few MiB, so 2 % are allowed."
    return Plain("Peak memory, 2 ranks", heads, rows, [note]), ratios


def _peak(work: Work, name: str) -> float:
    return float(max(harness.on_ranks(peak_on_rank, work, name)))


def measure(quick: bool) -> Result:
    chosen = {SIMPLE_NET: 10} if quick else WORKS
    races = {work: race(work, steps, 4 if quick else 12) for work, steps in chosen.items()}
    racing = [name for name in (OURS, RAW, ACCELERATE) if all(name not in one.absent for one in races.values())]
    table, ratios = memory(
        [SIMPLE_NET] if quick else [MLP_10M, SMALL_GPT], racing[:2] if quick else racing, 1 if quick else 3
    )
    headline = {
        f"{work.name.split(',')[0]}: ours_over_{key}": harness.ours_over(one, name)
        for work, one in races.items()
        for key, name in {"raw": RAW, "accelerate": ACCELERATE}.items()
    }
    headline |= {f"{name.split(',')[0]}: memory_over_raw": ratio for name, ratio in ratios.items()}
    goal = "1.00 x raw fully_shard, peak memory no higher"
    return Result("C5", "an FSDP step of two ranks", goal, list(races.values()), [table], headline)


def main() -> None:
    given = harness.parser(__doc__).parse_args()
    harness.finish(measure(given.quick), given.out)


if __name__ == "__main__":
    main()
