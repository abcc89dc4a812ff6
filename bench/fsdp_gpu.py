"""What helps a model that does not fit, on one GPU: fsdp's own bf16 beside autocast, and activation checkpointing.

python bench/fsdp_gpu.py [--quick] [--out FILE]

One GPT, in a fresh process for each row; fsdp in a world of one, where it gathers and reduces everything over NCCL, but
with itself. A row has the time of a step (median, and the least), the peak that torch's allocator gave out, and the
loss after the last step. The last column is the largest micro-batch that fits on an emulated GPU of 24 GB
(`set_per_process_memory_fraction`). `--quick` runs a small network on the CPU, to test this file.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

GB = 10**9
EMULATED = 24 * GB
STEPS, WARM_UP = 10, 3
CONTEXT = 1024


@dataclass(frozen=True)
class Row:
    """One way to train the model."""

    name: str
    strategy: str = "single"
    gathers_in_half: bool = True
    recomputes: bool = False


ROWS = (
    Row("single, autocast"),
    Row("single, autocast, --checkpoint-activations", recomputes=True),
    Row("fsdp, gathers in float32, autocast", "fsdp", gathers_in_half=False),
    Row("fsdp, gathers in bfloat16", "fsdp"),
    Row("fsdp, gathers in bfloat16, --checkpoint-activations", "fsdp", recomputes=True),
)


@dataclass(frozen=True)
class Measured:
    """What a row took."""

    row: str
    batch: int
    step_seconds: float
    least_seconds: float
    peak_bytes: int
    loss: float
    fits_24gb: int | None = None


def trained(row: Row, batch: int, is_quick: bool, steps: int = STEPS + WARM_UP) -> Measured:
    """Some steps, in this process."""
    import evenstep
    from evenstep.strategies.base import StrategySettings
    from evenstep.strategies.fsdp import FSDP
    from evenstep.tasks.networks import GPT
    from evenstep.training.activation_checkpointing import checkpoint_activations

    FSDP.wraps_alone = True
    torch.manual_seed(0)
    device, context = ("cpu", 32) if is_quick else ("cuda:0", CONTEXT)
    team = evenstep.join(row.strategy, devices=[device], precision="bf16")
    if isinstance(team.strategy, FSDP) and not row.gathers_in_half:
        team.strategy.configure(StrategySettings())
    network = GPT(64, 32, 2, 2, 32) if is_quick else GPT(50304, CONTEXT, 24, 16, 1024)
    if row.recomputes:
        checkpoint_activations(network)
    model = team.wrap(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not is_quick)
    tokens = torch.randint(0, 64, (batch * steps, context + 1), generator=torch.Generator().manual_seed(0))

    def loss(model: Any, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        scores = model(data[0])
        return F.cross_entropy(scores.flatten(0, 1), data[1].flatten())

    seconds, last = [], 0.0
    for number, one in enumerate(team.loader((tokens[:, :-1], tokens[:, 1:]), batch=batch)):
        started = time.perf_counter()
        last = float(team.backward(loss, model, one))
        team.step(optimizer)
        if not is_quick:
            torch.cuda.synchronize()
        if number == WARM_UP - 1 and not is_quick:
            torch.cuda.reset_peak_memory_stats()
        if number >= min(WARM_UP, steps - 1):
            seconds.append(time.perf_counter() - started)
    peak = 0 if is_quick else torch.cuda.max_memory_allocated()
    return Measured(row.name, batch, median(seconds), min(seconds), peak, last)


def largest(row: Row, is_quick: bool) -> int:
    """The largest micro-batch, a power of two, that runs on the emulated GPU; each is tried in this process."""
    if is_quick:
        return 0
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(EMULATED / total)
    found = 0
    for batch in (4, 8, 16, 32, 64):
        try:
            trained(row, batch, is_quick, steps=2)
        except torch.OutOfMemoryError:
            break
        found = batch
        gc.collect()
        torch.cuda.empty_cache()
    return found


def work(row: Row, batch: int, is_quick: bool, emulates: bool, answer: Any) -> None:
    """In a fresh process: what was kept by one row is no part of the next."""
    found = largest(row, is_quick) if emulates else asdict(trained(row, batch, is_quick))
    answer.put(found)


def in_process(*arguments: Any) -> Any:
    """What `work` answers."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=work, args=(*arguments, answer))
    process.start()
    found = answer.get(timeout=300)
    process.join()
    return found


def measured(batch: int, is_quick: bool) -> Iterator[Measured]:
    """All rows: their times one after the other, then what fits, at the same time, since an emulated GPU is a part."""
    timed = []
    for row in ROWS:
        timed.append(Measured(**in_process(row, batch, is_quick, False)))
        print(f"{row.name}: {timed[-1].step_seconds * 1000:.0f} ms, {timed[-1].peak_bytes / GB:.1f} GB", flush=True)
    with ThreadPoolExecutor(len(ROWS)) as pool:
        found = pool.map(lambda row: in_process(row, batch, is_quick, True), ROWS)
        yield from (replace(one, fits_24gb=fits) for one, fits in zip(timed, found, strict=True))


def table(rows: list[Measured]) -> str:
    """As docs/large-models.md has it."""
    lines = ["| what | step | peak | micro-batch that fits in 24 GB | loss |", "|---|---|---|---|---|"]
    for one in rows:
        fits = "" if one.fits_24gb is None else str(one.fits_24gb)
        lines.append(
            f"| {one.row} | {one.step_seconds * 1000:.0f} ms | {one.peak_bytes / GB:.1f} GB | {fits} | {one.loss:.3f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure all rows, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = list(measured(given.batch, given.quick))
    print(table(rows))
    if given.out is not None:
        name = "cpu" if given.quick else torch.cuda.get_device_name(0)
        command = " ".join(["python", *sys.argv])
        facts = {"device": name, "torch": torch.__version__, "command": command}
        given.out.write_text(json.dumps({**facts, "rows": [asdict(one) for one in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
