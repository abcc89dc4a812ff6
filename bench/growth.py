"""What a step costs as the work grows: time and memory against model size, batch, ranks and size of the dataset.

python bench/growth.py [--quick] [--out FILE]

Every point is measured in processes of its own, one thread each, by turns up and down. Memory is what the largest rank
took beyond what it had before, with its data (49 MiB at most). The slope is that of a straight line through the
logarithms: 1 is proportional, 0 is constant; it is also given for the upper half alone, where fixed costs no longer
count.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from statistics import median

import harness
import peers
import psutil
import torch
from harness import Plain, Result
from models import SIMPLE_NET, Work, mlp, num_parameters, pictures
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.distributed.devices import num_cores

WIDTHS = {"1M": 762, "3M": 1491, "10M": 2912, "30M": 5226, "100M": 9743}
"""Of a network 512-w-w-10 with about so many parameters."""
BATCHES = (32, 128, 512, 2048, 8192)
RANKS = (1, 2, 3, 4)
SIZES = tuple(10**power for power in range(3, 9))
MODEL_BATCH = 32
WARM_UP = 3
Point = tuple[float, float]
"""Milliseconds of a step, and MiB."""


def sized(width: int) -> Work:
    return Work("", lambda: mlp(512, width, width, 10), pictures(512), MODEL_BATCH, rows=512)


def batched(batch: int) -> Work:
    return Work("", SIMPLE_NET.network, SIMPLE_NET.draw, batch, rows=2 * max(BATCHES))


def trained(work: Work, steps: int) -> Point:
    """Called in every rank: one of them takes steps of ours."""
    torch.set_num_threads(1)
    team = evenstep.join("ddp")
    before = psutil.Process().memory_info().rss
    racer = peers.ours(team, work, True)
    racer.run(WARM_UP)
    milliseconds = harness.timed(racer.run, steps, True)
    return milliseconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20


def together(work: Work, steps: int, ranks: int) -> Point:
    """The slowest and the largest of so many ranks."""
    found = harness.on_ranks(trained, work, steps, devices=ranks)
    return max(one for one, _ in found), max(one for _, one in found)


class Tiny(nn.Module):
    """So small that reading is what a step is made of; takes bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(x[:, None].float())
        return logits


def read(num_samples: int, steps: int) -> tuple[float, float, float]:
    """Called in a process of its own: milliseconds to the first batch, of a step, and MiB beyond the data."""
    torch.set_num_threads(1)
    column = torch.randint(256, (num_samples,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    team = evenstep.join("ddp", ("cpu",))
    model = team.wrap(Tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    batches = peers.endless(team.loader((column, column), batch=128))
    next(batches)
    first = time.perf_counter() - started

    def run(num: int) -> None:
        for batch in islice(batches, num):
            team.backward(lambda network, data: F.cross_entropy(network(data[0]), data[1].long() % 2), model, batch)
            team.step(optimizer)

    run(WARM_UP)
    milliseconds = harness.timed(run, steps)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return first * 1e3, milliseconds, max(0.0, after - before) / 2**20


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of the straight line through the logarithms, by least squares."""
    x, y = [math.log(one) for one in sizes], [math.log(one) for one in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def slopes(what: str, sizes: Sequence[float], values: Sequence[float]) -> str:
    """`step ms: slope 0.52, 0.95 in the upper half`."""
    half = len(sizes) // 2
    upper = f", {slope(sizes[half:], values[half:]):.2f} in the upper half" if len(sizes) - half > 1 else ""
    return f"{what}: slope {slope(sizes, values):.2f}{upper}"


def medians(points: Mapping[str, Callable[[], tuple[float, ...]]], rounds: int) -> dict[str, list[float]]:
    """Of each point, over the rounds; up and down in turn."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in points}
    for number in range(rounds):
        for name in list(points)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(points[name]())
    return {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}


def table(title: str, heads: list[str], sizes: Sequence[float], found: Mapping[str, Sequence[float]]) -> Plain:
    """A row for each size; below it, the slope of every column."""
    rows = [[name, *(harness.number(value) for value in values)] for name, values in found.items()]
    columns = list(zip(*found.values(), strict=True))
    notes = [slopes(head, sizes, column) for head, column in zip(heads[1:], columns, strict=True) if min(column) > 0]
    return Plain(title, heads, rows, notes if len(sizes) > 1 else [])


def alone(num_samples: int, steps: int) -> tuple[float, float, float]:
    (found,) = harness.on_ranks(read, num_samples, steps, devices=1)
    return found


def measure(quick: bool) -> Result:
    rounds = 1 if quick else 3
    widths = dict(list(WIDTHS.items())[: 2 if quick else None])
    batches, ranks, sizes = (BATCHES[:2], RANKS[:2], SIZES[:2]) if quick else (BATCHES, RANKS, SIZES)
    heads = ["step ms", "MiB a rank"]

    by_size = medians({name: partial(together, sized(width), 3, 2) for name, width in widths.items()}, rounds)
    parameters = [num_parameters(mlp(512, width, width, 10)) for width in widths.values()]
    by_batch = medians({str(one): partial(together, batched(one), 10, 2) for one in batches}, rounds)
    names = {one: f"{one}{', sharing cores' if one > num_cores() else ''}" for one in ranks}
    by_ranks = medians({names[one]: partial(together, batched(768), 20, one) for one in ranks}, rounds)
    by_samples = medians({f"{one:,}": partial(alone, one, 50) for one in sizes}, rounds)
    tables = [
        table("Model size, MLP 512-w-w-10, 2 ranks, batch 32", ["parameters", *heads], parameters, by_size),
        table("Batch, SimpleNet, 2 ranks", ["batch", *heads], batches, by_batch),
        table(f"Ranks, SimpleNet, batch 768, {num_cores()} cores", ["ranks", *heads], ranks, by_ranks),
        table(
            "Samples in the dataset, a tiny network, 1 rank, batch 128",
            ["samples", "first batch ms", "step ms", "MiB beyond the data"],
            sizes,
            by_samples,
        ),
    ]
    headline = {
        "parameters: slope of time": slope(parameters, [one[0] for one in by_size.values()]),
        "samples: slope of time": slope(sizes, [one[1] for one in by_samples.values()]),
    }
    goal = "at most proportional to parameters and batch; constant in the size of the dataset"
    return Result("growth", "cost as work grows", goal, tables=tables, headline=headline)


def main() -> None:
    given = harness.parser(__doc__).parse_args()
    harness.finish(measure(given.quick), given.out)


if __name__ == "__main__":
    main()
