"""C8: predicted steps beside measured ones that the model has not seen.

python bench/c8_predict.py [--quick] [--out FILE] [--keep FOLDER]      on the CPU, one thread a process

For each network: one rank at a batch and at a quarter of it, and two ranks at the batch, are measured and given to
`evenstep predict`. Held out: half of the batch on one and two ranks, and three and four ranks. All blocks are taken
six times, in alternating order, and their medians compared; what the first half of equal blocks differs by from the
second is the noise below which no error means anything.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from evenstep.compare.measure import Block, measure
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import prepare
from evenstep.predict.own_records import replay_records
from evenstep.predict.published import Checked
from evenstep.record import Record

TASKS = {"simple_net": 512, "small_cnn": 128, "wide_mlp": 64, "encoder": 64}
STEPS = {"simple_net": 150, "small_cnn": 60, "wide_mlp": 8, "encoder": 40}
ROUNDS = 6


def blocks(batch: int) -> list[tuple[str, int, int]]:
    """Strategy, ranks and batch of each: inputs and what is held out."""
    known = [("single", 1, batch), ("single", 1, batch // 4), ("ddp", 2, batch)]
    return [*known, ("single", 1, batch // 2), ("ddp", 2, batch // 2), ("ddp", 3, batch), ("ddp", 4, batch)]


def is_input(batch: int, record: Record) -> bool:
    devices = len(record.plan.devices)
    return (devices, record.plan.batch) in ((1, batch), (1, batch // 4), (2, batch))


def measured(task: str, folder: Path, rounds: int, steps: int) -> Path:
    """The Records of all blocks of a task."""
    batch = TASKS[task]
    source = f"{Path(__file__).with_name('parts.py')}:{task}"
    choices: dict[str, Any] = {"strategy": "single", "devices": ["cpu"], "batch": batch, "threads": 1, "name": task}
    base = prepare(source, {**choices, "out": str(folder)})
    block = Block(warm_up=3, steps=steps, special=max(4, steps // 4))
    for number in range(rounds):
        for strategy, ranks, size in blocks(batch)[:: -1 if number % 2 else 1]:
            name = f"{strategy}-{ranks}-{size}-round-{number}"
            changes = {"strategy": strategy, "devices": ("cpu",) * ranks, "batch": size}
            one = variant(base, base.folder / name, steps=block.plan_steps, **changes)
            for _ in run_in_processes(one, partial(measure, block=block)):
                pass
    return base.folder


def medians(rows: Iterable[Checked]) -> list[Checked]:
    """One row for the equal blocks of all rounds."""
    alike: dict[str, list[Checked]] = {}
    for row in rows:
        alike.setdefault(row.name, []).append(row)
    return [replace(of[0], measured=median(row.measured for row in of)) for of in alike.values()]


def noise(folder: Path, rounds: int) -> float:
    """By how much the medians of two halves of equal blocks differ; the median over kinds of blocks."""
    rates: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*/record.jsonl")):
        found = Record.read(path).measurement
        if found is not None:
            rates.setdefault(path.parent.name.rpartition("-round-")[0], []).append(found.samples / found.seconds)
    halves = [(median(of[::2]), median(of[1::2])) for of in rates.values() if rounds > 1]
    return median(max(pair) / min(pair) - 1 for pair in halves) if halves else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="where the Records stay")
    given = parser.parse_args()
    tasks = ["simple_net"] if given.quick else list(TASKS)
    rounds = 1 if given.quick else ROUNDS
    rows: list[Checked] = []
    noises: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for task in tasks:
            steps = 12 if given.quick else STEPS[task]
            folder = measured(task, given.keep or Path(temporary), rounds, steps)
            rows += medians(replay_records(folder, partial(is_input, TASKS[task])))
            noises[task] = noise(folder, rounds)
    errors = sorted(row.error for row in rows)
    result = {
        "id": "C8",
        "goal": "median error 5 %, worst 12 %",
        "median": median(errors),
        "worst": errors[-1],
        "noise": noises,
        "rows": [
            {"name": row.name, "measured": row.measured, "predicted": row.predicted, "error": row.error} for row in rows
        ],
    }
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
