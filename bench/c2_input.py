"""C2: how fast samples come. One process, one thread, on the CPU, in four tables.

python bench/c2_input.py [--quick] [--out FILE]

1. Shuffled batches of bytes, as tuples and as dicts: evenstep, torch's DataLoader as people write it and as well as it
   can be tuned, and what indexing alone would take. What each racer delivers is compared first: every sample once.
2. What the order of samples costs at 60 thousand, 10 million and a billion samples.
3. Loader workers: what they hide of a dataset that waits a millisecond for every sample.
4. A dataset that only gives one sample at a time, and at once: evenstep against DataLoader, with as many workers.

The clock holds the drawing of the order and the start of an epoch; the start of worker processes is outside.
"""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import harness
import psutil
import torch
from harness import Plain, Race, Result, Row
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, TensorDataset

import evenstep
from evenstep.sampling.order import Span
from evenstep.sampling.samplers import Shuffled

ROUNDS = 8
EPOCHS_A_BLOCK = 2
SLOW_BATCHES_A_BLOCK = 48
"""Racers that run Python for every sample get shorter blocks; figures are rates."""
GOALS = {
    "DataLoader, per sample": 15.0,
    "DataLoader, TensorDataset": 15.0,
    "DataLoader, __getitems__": 1.2,
    "X[index]": 0.8,
}
"""Ours / theirs, at least."""
AGAIN, LIMITS = "evenstep, again", ("X[index]", "index_select")

ORDER_SIZES = (60_000, 10_000_000, 1_000_000_000)
ORDER_BATCH = 128
ORDER_BATCHES = 2048
MOST_LISTED = 100_000_000
"""A list of all ids is not made beyond this."""

WAIT_SECONDS = 0.001
WAIT_SAMPLES = 384
WAIT_BATCH = 32
WAIT_ROUNDS = 2

SINGLE_SAMPLES = 4096


def as_tuple(images: Tensor, labels: Tensor) -> Any:
    return images, labels


def as_dict(images: Tensor, labels: Tensor) -> Any:
    return {"image": images, "label": labels}


@dataclass(frozen=True)
class Work:
    """Pictures of one shape, in the container that users have them in, and the batch."""

    name: str
    shape: tuple[int, ...]
    pack: Callable[[Tensor, Tensor], Any]
    batch: int

    def columns(self) -> tuple[Tensor, Tensor]:
        """Random pictures and labels; the same at every call."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, self.shape, dtype=torch.uint8, generator=generator)
        return images, torch.randint(0, 10, self.shape[:1], generator=generator)


FASHION = (60_000, 28, 28)
CIFAR = (50_000, 3, 32, 32)
WORKS = (
    Work("Fashion-MNIST, tuple, batch 128", FASHION, as_tuple, 128),
    Work("Fashion-MNIST, dict, batch 128", FASHION, as_dict, 128),
    Work("Fashion-MNIST, tuple, batch 512", FASHION, as_tuple, 512),
    Work("CIFAR, tuple, batch 128", CIFAR, as_tuple, 128),
    Work("CIFAR, dict, batch 128", CIFAR, as_dict, 128),
)


QUICK = Work("12,800 pictures as in Fashion-MNIST, tuple, batch 128", (12_800, 28, 28), as_tuple, 128)


class PerSample(Dataset[Any]):
    """What people write: one sample at a time."""

    def __init__(self, images: Tensor, labels: Tensor, pack: Callable[[Tensor, Tensor], Any]) -> None:
        self.images, self.labels, self.pack = images, labels, pack

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, id_: Any) -> Any:
        return self.pack(self.images[id_], self.labels[id_])


class Listed(PerSample):
    """The samples of a batch in one call, as a list: what `__getitems__` is documented to return."""

    def __getitems__(self, ids: list[int]) -> list[Any]:
        index = torch.tensor(ids)
        return [self.pack(*one) for one in zip(self.images[index], self.labels[index], strict=True)]


class Whole(PerSample):
    """A batch in one index operation; it needs a collate that passes it on."""

    def __getitems__(self, ids: list[int]) -> Any:
        index = torch.tensor(ids)
        return self.pack(self.images[index], self.labels[index])


class Selected(PerSample):
    """The fastest that a DataLoader can be made: its sampler gives whole batches of ids, as tensors."""

    def __getitem__(self, id_: Any) -> Any:
        return self.pack(self.images.index_select(0, id_), self.labels.index_select(0, id_))


class Some(Sampler[int]):
    """The first `count` ids of a new random order; cheaper than torch's own, which lists all of them."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = self.count = num_samples

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.num_samples)[: self.count].tolist())


class Batches(Sampler[Tensor]):
    """A new random order, cut into batches."""

    def __init__(self, num_samples: int, batch: int) -> None:
        self.num_samples, self.batch = num_samples, batch

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(self.num_samples).split(self.batch))


def passed_on(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Racer:
    """Something that gives the batches of a new epoch whenever it is opened."""

    open: Callable[[], Iterable[Any]]
    num_samples: int
    data: Callable[[Any], Any] = passed_on
    """The tensors of one of its batches."""
    sampler: Some | None = None
    """Where it can be told to give less than an epoch."""

    def content(self) -> tuple[int, int, int, int]:
        """What a whole epoch holds: samples, the sums of their bytes and labels, and which label went with which."""
        num = pixels = classes = pairs = 0
        for batch in self.open():
            data = self.data(batch)
            images, labels = data.values() if isinstance(data, dict) else data
            sums = images.flatten(1).sum(1)
            num += len(labels)
            pixels += int(sums.sum())
            classes += int(labels.sum())
            pairs += int((sums * labels).sum())
        return num, pixels, classes, pairs

    def short(self, num_batches: int, batch: int) -> None:
        """Give so many batches from now on, where that is possible."""
        if self.sampler is not None:
            self.sampler.count = min(num_batches * batch, self.num_samples)

    def samples_per_second(self) -> float:
        """One block."""
        epochs = EPOCHS_A_BLOCK if self.sampler is None else 1
        num = self.num_samples * epochs if self.sampler is None else self.sampler.count
        started = time.perf_counter()
        for _ in range(epochs):
            for _batch in self.open():  # a loop holds its batch until it has the next
                pass
        return num / (time.perf_counter() - started)


def ours(work: Work) -> Racer:
    columns = work.columns()
    loader = evenstep.join("single", ("cpu",)).loader(work.pack(*columns), batch=work.batch)
    return Racer(lambda: loader, len(columns[0]), lambda batch: batch.micro_batches[0][0].data)


def peers(work: Work) -> Iterator[tuple[str, Racer]]:
    """The others, and the limits; each is made when its turn comes, and its workers end with it."""
    images, labels = work.columns()
    num = len(labels)

    def dataloader(kind: type[PerSample], **how: Any) -> Racer:
        sampler = Some(num)
        loader = DataLoader(kind(images, labels, work.pack), work.batch, sampler=sampler, **how)
        return Racer(lambda: loader, num, sampler=sampler)

    def limit(take: Callable[[Tensor, Tensor], Tensor]) -> Racer:
        def batches() -> Iterator[Any]:
            for index in torch.randperm(num).split(work.batch):
                yield work.pack(take(images, index), take(labels, index))

        return Racer(batches, num)

    yield "DataLoader, per sample", dataloader(PerSample)
    if work.pack is as_tuple:
        sampler = Some(num)
        ready_made = DataLoader(TensorDataset(images, labels), work.batch, sampler=sampler)
        yield "DataLoader, TensorDataset", Racer(lambda: ready_made, num, sampler=sampler)
    for workers in (1, 2):
        name = f"DataLoader, per sample, {workers} worker{'s' * (workers > 1)}"
        yield name, dataloader(PerSample, num_workers=workers, persistent_workers=True)
    yield "DataLoader, __getitems__", dataloader(Listed)
    yield "DataLoader, __getitems__ in one X[index]", dataloader(Whole, collate_fn=passed_on)
    tuned = DataLoader(
        Selected(images, labels, work.pack), None, sampler=Batches(num, work.batch), collate_fn=passed_on
    )
    yield "DataLoader, sampler of batches, index_select", Racer(lambda: tuned, num)
    yield "X[index]", limit(lambda column, index: column[index])
    yield "index_select", limit(lambda column, index: column.index_select(0, index))


def race_all(work: Work, rounds: int) -> Race:
    """Ours against each, as ours / theirs; first against itself."""
    own = ours(work)
    expected = own.content()
    results = {}
    for name, racer in itertools.chain([(AGAIN, ours(work))], peers(work)):
        if racer.content() != expected:
            raise SystemExit(f"{work.name}: {name} does not deliver the same samples; no race")
        racer.short(SLOW_BATCHES_A_BLOCK, work.batch)
        results[name] = harness.race(racer.samples_per_second, own.samples_per_second, rounds)
    median = statistics.median(row.second for row in results.values())
    rows = [Row("evenstep", "ours", "", median), *(entered(name, row) for name, row in results.items())]
    return Race(work.name, "samples/s", rows)


def entered(name: str, found: harness.Ratio) -> Row:
    """A racer in the table; goals are of ours / theirs."""
    kind: harness.Kind = "control" if name == AGAIN else "limit" if name in LIMITS else "peer"
    goal = GOALS.get(name, 1.0 if kind == "peer" else None)
    return Row(name, kind, "", found.first, found.ratio, found.low, found.high, goal, "evenstep")


def our_order(num: int) -> Callable[[int, int], Any]:
    order = Shuffled().order(num, 0, ORDER_BATCH)
    return lambda start, stop: order.ids(Span(0, start, stop))


def randperm(num: int) -> Callable[[int, int], Any]:
    order = torch.randperm(num)
    return lambda start, stop: order[start:stop]


def listed(num: int) -> Callable[[int, int], Any]:
    ids = iter(RandomSampler(range(num)))
    return lambda start, stop: list(itertools.islice(ids, stop - start))


@dataclass(frozen=True)
class Cost:
    """What an order takes, up to its first batch and after it."""

    first_ms: float
    batch_us: float
    """Of the first few thousand batches, without the very first."""
    peak_bytes: int


ORDERS: dict[str, tuple[Callable[[int], Callable[[int, int], Any]], int]] = {
    "evenstep": (our_order, 0),
    "torch.randperm": (randperm, 8),
    "RandomSampler, what DataLoader shuffles with": (listed, 48),
}
"""How an order is made, and the bytes it needs for each sample: a number of 8; a list of pointers to objects of 32."""


def order_cost(name: str, num: int) -> Cost:
    """Called in a process of its own, so that its peak memory is this order's."""
    make, _ = ORDERS[name]
    make(1000)(0, ORDER_BATCH)  # what is imported at the first call is not the order's
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    take = make(num)
    take(0, ORDER_BATCH)
    first = time.perf_counter()
    batches = range(1, min(num // ORDER_BATCH, ORDER_BATCHES))
    for number in batches:
        take(number * ORDER_BATCH, (number + 1) * ORDER_BATCH)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Cost((first - started) * 1e3, (done - first) / len(batches) * 1e6, max(0, peak - before))


def order_costs() -> dict[str, dict[str, Any]]:
    """The cost of every order at every size; of one that would fill the memory, what it would need."""
    results: dict[str, dict[str, Any]] = {}
    for num, name in itertools.product(ORDER_SIZES, ORDERS):
        needed = ORDERS[name][1] * num
        if needed and num > MOST_LISTED:
            results[f"{num:,}: {name}"] = {"not run; it would need bytes": needed}
            continue
        with multiprocessing.get_context("fork").Pool(1) as pool:
            results[f"{num:,}: {name}"] = asdict(pool.apply(order_cost, (name, num)))
    return results


def table_of_orders(results: dict[str, dict[str, Any]]) -> Plain:
    rows = []
    for name, row in results.items():
        if "first_ms" in row:
            memory = f"{row['peak_bytes'] / 1e6:,.1f} MB"
            rows.append([name, f"{row['first_ms']:,.1f}", f"{row['batch_us']:.1f}", memory])
        else:
            (needed,) = row.values()
            rows.append([name, "not run", "", f"would need {needed / 1e9:.0f} GB"])
    heads = ["samples: order", "first batch ms", "each batch us", "peak memory"]
    return Plain(f"The order of samples, batches of {ORDER_BATCH}", heads, rows)


class Waiting(Dataset[Any]):
    """Waits for every sample, as for a disk or a network, and uses no CPU for it."""

    def __len__(self) -> int:
        return WAIT_SAMPLES

    def __getitem__(self, id_: int) -> Tensor:
        time.sleep(WAIT_SECONDS)
        return torch.tensor(id_)


def waited(workers: int, step_seconds: float) -> float:
    """Samples a second of an epoch, beside steps that take so long."""
    loader = evenstep.join("single", ("cpu",)).loader(Waiting(), batch=WAIT_BATCH, workers=workers)

    def epoch() -> float:
        seen = []
        started = time.perf_counter()
        for batch in loader:
            seen += batch.micro_batches[0][0].data.tolist()
            time.sleep(step_seconds)
        rate = WAIT_SAMPLES / (time.perf_counter() - started)
        if sorted(seen) != list(range(WAIT_SAMPLES)):
            raise SystemExit(f"{workers} workers did not deliver every sample once")
        return rate

    try:
        return statistics.median([epoch() for _ in range(1 + WAIT_ROUNDS)][1:])
    finally:
        loader.close()


def waits() -> dict[str, dict[str, float]]:
    """With 0, 1 and 2 workers: alone, and beside steps as long as one worker takes for a batch."""
    step = WAIT_SECONDS * WAIT_BATCH
    return {
        str(workers): {"alone": waited(workers, 0.0), "beside_steps": waited(workers, step)} for workers in (0, 1, 2)
    }


def table_of_waits(results: dict[str, dict[str, float]]) -> Plain:
    title = f"Loader workers: {WAIT_SECONDS * 1e3:g} ms of waiting for each sample, batch {WAIT_BATCH}, samples/s"
    heads = ["workers", "alone", f"beside steps of {WAIT_SECONDS * WAIT_BATCH * 1e3:g} ms"]
    rows = [[name, f"{row['alone']:,.0f}", f"{row['beside_steps']:,.0f}"] for name, row in results.items()]
    return Plain(title, heads, rows)


def race_per_sample(workers: int) -> harness.Ratio:
    """The same dataset read by evenstep and by DataLoader, as ours / theirs."""
    work = Work("per sample", (SINGLE_SAMPLES, *FASHION[1:]), as_tuple, 128)
    data = PerSample(*work.columns(), work.pack)
    loader = evenstep.join("single", ("cpu",)).loader(data, batch=work.batch, workers=workers)
    theirs = DataLoader(data, work.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    own = Racer(lambda: loader, len(data), lambda batch: batch.micro_batches[0][0].data)
    peer = Racer(lambda: theirs, len(data))
    if own.content() != peer.content():
        raise SystemExit("evenstep and DataLoader do not deliver the same samples; no race")
    try:
        return harness.race(peer.samples_per_second, own.samples_per_second, ROUNDS)
    finally:
        loader.close()


def table_of_singles(results: dict[str, harness.Ratio]) -> Plain:
    title = "A dataset read sample by sample, Fashion-MNIST, batch 128, samples/s"
    heads = ["workers", "DataLoader", "evenstep", "ours is x as fast", "95 %"]
    rows = [
        [name, f"{row.first:,.0f}", f"{row.second:,.0f}", f"{row.ratio:.3f}", row.interval]
        for name, row in results.items()
    ]
    return Plain(title, heads, rows)


def measure(quick: bool) -> Result:
    torch.set_num_threads(1)
    if quick:
        races, tables = [race_all(QUICK, 3)], []
    else:
        orders = order_costs()  # first, while this process is small
        races, tables = [race_all(work, ROUNDS) for work in WORKS], [table_of_orders(orders)]
        singles = {str(workers): race_per_sample(workers) for workers in (0, 1, 2)}
        tables += [table_of_waits(waits()), table_of_singles(singles)]
    keys = {"dataloader": "DataLoader, per sample", "getitems": "DataLoader, __getitems__", "index": "X[index]"}
    headline = {f"ours_over_{key}": harness.ours_over(races[0], name) for key, name in keys.items()}
    goal = "15 x DataLoader, 1.2 x __getitems__"
    return Result("C2", "input", goal, races, tables, headline)


def main() -> None:
    given = harness.parser(__doc__).parse_args()
    harness.finish(measure(given.quick), given.out)


if __name__ == "__main__":
    main()
