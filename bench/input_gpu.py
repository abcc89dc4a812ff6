"""What input costs beside a training on one CUDA card: ResNet-18, pictures as in CIFAR-10, batch 256, bf16.

PYTHONPATH=src python3 bench/input_gpu.py [OUT.json]      on the first CUDA card, two to three minutes
python bench/input_gpu.py --smoke                         tiny, on the CPU: only to see that it runs

Every way of input trains the same network, whole epochs by turns, A B C C B A; what each delivers is compared first.
The wait is that of a Record's `input_seconds`: host time from asking for a batch to having it. A host that does not
wait may still make the card wait, so steps are also compared with steps on a batch that is there already. The device is
synchronised before every clock; workers are started outside it, and an epoch's start is inside.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import harness
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import evenstep
from evenstep.data.loader import Batch, Loader, MicroBatch
from evenstep.sampling.order import Span
from evenstep.tasks.networks import Net, Normalize, ResNet18
from evenstep.training.team import Team

GOAL_SHARE = 0.02
"""The most that a step may wait for its input."""
NO_INPUT = "no input: one batch again and again"
DEFAULT = "default: thread, pinned, own stream"
DEFAULT_AGAIN = "default, again"
SMOKE = "--smoke" in sys.argv or not torch.cuda.is_available()
DEVICE = torch.device("cpu" if SMOKE else "cuda:0")
NUM_SAMPLES = 100 if SMOKE else 50_000
BATCH = 16 if SMOKE else 256
OUR_WORKERS = 1 if SMOKE else 4
THEIR_WORKERS = 2 if SMOKE else 8
ROUNDS = 2 if SMOKE else 4
COPIES = 10 if SMOKE else 1000
NETWORK = Net if SMOKE else ResNet18

generator = torch.Generator().manual_seed(0)
images = torch.randint(0, 256, (NUM_SAMPLES, 3, 32, 32), dtype=torch.uint8, generator=generator)
labels = torch.randint(0, 10, (NUM_SAMPLES,), generator=generator)

Open = Callable[[], Iterable[Batch]]
"""Gives the batches of an epoch, on the device."""


class PerSample(Dataset[Any]):
    """One sample at a time."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, id_: int) -> tuple[Tensor, Tensor]:
        return images[id_], labels[id_]


class Whole(PerSample):
    """A batch in one operation; it needs a collate that passes it on."""

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(ids)
        return images.index_select(0, index), labels.index_select(0, index)


def passed_on(batch: Any) -> Any:
    return batch


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def by_hand(data: tuple[Tensor, Tensor], loader: Loader) -> Batch:
    """A batch as Team.backward takes it, made of tensors that came another way."""
    num = len(data[1])
    return Batch(Span(0, 0, num), [[MicroBatch(data, np.arange(num), num)]], loader, is_epoch_end=False, checked=None)


def configs(team: Team) -> dict[str, Open]:
    """The ways of input, and none."""
    table = (images, labels)

    def ours(data: Any = table, **how: Any) -> Loader:
        return team.loader(data, batch=BATCH, **how)

    def theirs(data: PerSample, **how: Any) -> Open:
        loader = DataLoader(
            data,
            BATCH,
            shuffle=True,
            num_workers=THEIR_WORKERS,
            pin_memory=DEVICE.type == "cuda",
            persistent_workers=True,
            prefetch_factor=4,
            **how,
        )

        def batches() -> Iterator[Batch]:
            for data in loader:
                yield by_hand(tuple(column.to(DEVICE, non_blocking=True) for column in data), spare)

        return batches

    spare = ours()
    sizes = [min(BATCH, NUM_SAMPLES - start) for start in range(0, NUM_SAMPLES, BATCH)]
    there = {num: by_hand((images[:num].to(DEVICE), labels[:num].to(DEVICE)), spare) for num in set(sizes)}
    default, again, resident = ours(), ours(), ours(resident=True)
    workers = ours(PerSample(), workers=OUR_WORKERS)
    here = ours()
    # What a loader without reading ahead would do: index and copy when the batch is asked for.
    here._copies = {}
    here._training._reader._pinned = False
    return {
        NO_INPUT: lambda: [there[num] for num in sizes],
        "no input, again": lambda: [there[num] for num in sizes],
        DEFAULT: lambda: default,
        DEFAULT_AGAIN: lambda: again,
        "resident": lambda: resident,
        f"{OUR_WORKERS} loader workers, per sample": lambda: workers,
        "nothing ahead, not pinned": lambda: here,
        f"DataLoader, {THEIR_WORKERS} workers, pinned, per sample": theirs(PerSample()),
        f"DataLoader, {THEIR_WORKERS} workers, pinned, __getitems__": theirs(Whole(), collate_fn=passed_on),
    }


def content(batches: Iterable[Batch]) -> tuple[int, ...]:
    """What an epoch holds: samples, the sums of their bytes and labels, and which label went with which."""
    sums = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    for batch in batches:
        pictures, classes = batch.micro_batches[0][0].data
        pixels = pictures.flatten(1).sum(1)
        sums += torch.stack([torch.ones_like(classes).sum(), pixels.sum(), classes.sum(), (pixels * classes).sum()])
    return tuple(sums.tolist())


@dataclass(frozen=True)
class Epoch:
    """One epoch of training."""

    step_ms: float
    wait_ms: float
    """The median over its steps."""
    wait_share: float
    """The median wait, as a share of the mean step."""
    wait_share_of_all: float
    """All waits together, as a share of the epoch; the start of the epoch is in it."""


class Trainer:
    """The same network, loss and optimizer for all ways."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._model = team.wrap(NETWORK(Normalize([125.307, 122.950, 113.865], [62.993, 62.089, 66.705])))
        # A small rate: the labels are random, and only the time is of interest.
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)

    def epoch(self, open_: Open) -> Epoch:
        """Train on what `open_` gives, with a clock on every wait."""
        waits = []
        synchronize()
        began = time.perf_counter()
        batches = iter(open_())
        asked = began
        while (batch := next(batches, None)) is not None:
            waits.append(time.perf_counter() - asked)
            self._team.backward(loss, self._model, batch)
            self._team.step(self._optimizer)
            asked = time.perf_counter()
        synchronize()
        seconds = time.perf_counter() - began
        step, wait = seconds / len(waits), statistics.median(waits)
        return Epoch(step * 1e3, wait * 1e3, wait / step, sum(waits) / seconds)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images_per_second(open_: Open) -> float:
    """The input alone, up to the device."""
    synchronize()
    began = time.perf_counter()
    for _batch in open_():
        pass
    synchronize()
    return NUM_SAMPLES / (time.perf_counter() - began)


def copied_per_second() -> float:
    """The limit of everything that comes from the host: pinned batches copied to the device, images a second."""
    host = [column[:BATCH].clone() for column in (images, labels)]
    if DEVICE.type == "cuda":
        host = [column.pin_memory() for column in host]
    there = [column.to(DEVICE) for column in host]
    synchronize()
    began = time.perf_counter()
    for _ in range(COPIES):
        for column, target in zip(host, there, strict=True):
            target.copy_(column, non_blocking=True)
    synchronize()
    return COPIES * BATCH / (time.perf_counter() - began)


def gathered_per_second() -> float:
    """The limit of a shuffled order on the host: one index operation a batch, images a second."""
    began = time.perf_counter()
    for index in torch.randperm(NUM_SAMPLES).split(BATCH):
        _ = images.index_select(0, index), labels.index_select(0, index)
    return NUM_SAMPLES / (time.perf_counter() - began)


def check(opened: dict[str, Open]) -> None:
    """Refuse a way that does not deliver every sample once; this starts the workers, too."""
    expected = content([by_hand((images.to(DEVICE), labels.to(DEVICE)), None)])
    for name, open_ in opened.items():
        if not name.startswith("no input") and content(open_()) != expected:
            raise SystemExit(f"{name} does not deliver every sample once; no race")


def race_steps(opened: dict[str, Open], trainer: Trainer) -> dict[str, dict[str, float]]:
    """Training epochs of all ways by turns; the ratio is to a step without input."""
    trainer.epoch(opened[NO_INPUT])
    epochs: dict[str, list[Epoch]] = {name: [] for name in opened if name != DEFAULT_AGAIN}

    def block(name: str) -> float:
        epochs[name].append(trainer.epoch(opened[name]))
        return epochs[name][-1].step_ms

    times = harness.interleaved({name: lambda name=name: block(name) for name in epochs}, ROUNDS)
    results = {}
    for name, rows in epochs.items():
        medians = {key: statistics.median(asdict(row)[key] for row in rows) for key in asdict(rows[0])}
        ratio = harness.compared(times[NO_INPUT], times[name])
        results[name] = {**medians, "ratio": ratio.ratio, "low": ratio.low, "high": ratio.high}
    return results


def race_alone(opened: dict[str, Open]) -> dict[str, harness.Ratio]:
    """Input without training, and its limits; the ratio is the default's rate to theirs."""
    blocks: dict[str, harness.Block] = {
        name: lambda open_=open_: images_per_second(open_)
        for name, open_ in opened.items()
        if not name.startswith("no input")
    }
    blocks["limit: pinned copies to the device"] = copied_per_second
    blocks["limit: index_select on the host"] = gathered_per_second
    figures = harness.interleaved(blocks, ROUNDS)
    return {name: harness.compared(rates, figures[DEFAULT]) for name, rates in figures.items()}


def judged(name: str, share: float) -> str:
    is_ours = name.startswith(("default", "resident", f"{OUR_WORKERS} loader"))
    return "" if SMOKE or not is_ours else f"{GOAL_SHARE:.0%}: {'met' if share < GOAL_SHARE else 'missed'}"


def show(steps: dict[str, dict[str, float]], alone: dict[str, harness.Ratio]) -> None:
    harness.show(
        f"{NETWORK.__name__}, {NUM_SAMPLES:,} x 3 x 32 x 32 bytes, batch {BATCH}, bf16, {DEVICE}",
        ("input", "step ms", "/ no input", "95 %", "wait ms", "of step", "of all", "goal"),
        (
            (
                name,
                f"{row['step_ms']:.3f}",
                f"{row['ratio']:.3f}",
                f"{row['low']:.3f} to {row['high']:.3f}",
                f"{row['wait_ms']:.3f}",
                f"{row['wait_share']:.2%}",
                f"{row['wait_share_of_all']:.2%}",
                judged(name, row["wait_share"]),
            )
            for name, row in steps.items()
        ),
    )
    harness.show(
        "\nThe input alone",
        ("input", "images/s", "default / this", "95 %"),
        ((name, f"{row.first:,.0f}", f"{row.ratio:.3f}", row.interval) for name, row in alone.items()),
    )


def main() -> None:
    if SMOKE:
        torch.set_num_threads(1)
    team = evenstep.join("single", (str(DEVICE),), precision="bf16")
    opened = configs(team)
    check(opened)
    alone = race_alone(opened)
    steps = race_steps(opened, Trainer(team))
    show(steps, alone)
    files = [argument for argument in sys.argv[1:] if argument != "--smoke"]
    if files:
        as_json = {name: row.figures("images_per_second") for name, row in alone.items()}
        command = "python bench/input_gpu.py" + " --smoke" * SMOKE
        harness.write(files[0], command, {"steps": steps, "input alone, default / this": as_json})


if __name__ == "__main__":
    main()
