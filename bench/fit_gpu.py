"""G5: the memory of a step, forecast from shapes, beside what real steps take; and chosen micro-batches that must fit.

python bench/fit_gpu.py [--quick] [--out FILE]      6 networks x 2 precisions x 3 emulated sizes of a GPU

For each network and precision, in a process of its own: one forecast from shapes; then for each size real steps with a
part of the samples, which correct it. The micro-batch that `fit` would choose is trained for three steps under
`set_per_process_memory_fraction`, and its peak is compared. More sizes follow, until over 100 choices were trained:
none of them may run out of memory. Without a GPU (--quick), two networks on the CPU, where the peak is that of the
process and no size is enforced.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep import Task
from evenstep.distributed.devices import facts
from evenstep.fit.device_memory import CONTEXT_BYTES, limit_gpus, workspace_bytes
from evenstep.fit.memory_model import cuts, largest_fitting, peak, usable
from evenstep.fit.memory_probe import FILE, MemoryProbe
from evenstep.fit.shape_pass import calibrated, step_memory
from evenstep.launcher.micro_batch import placement
from evenstep.monitor.known_errors import is_out_of_memory
from evenstep.plan import Plan
from evenstep.strategy_facts import REFERENCE, STRATEGIES
from evenstep.tasks.networks import GPT, Normalize, ResNet18
from evenstep.training.trainer import perform

GB = 10**9
SIZES = (2 * GB, 4 * GB, 8 * GB)
"""Of the emulated GPUs, for the allocator: what CUDA itself takes is on top."""
MORE_SIZES = 6
AT_ONCE = 6
"""Processes; memory is measured, not time."""
STEPS = 3
BATCHES = 6
"""Of an epoch: the next ones are read while a step runs."""
BYTES = ([125.307, 122.950, 113.865], [62.993, 62.089, 66.705])
"""Mean and deviation of photographs."""


class Sequences(nn.Module):
    """An LSTM over a sequence of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0][:, -1]
        return self.head(out)  # type: ignore[no-any-return]


class Patches(nn.Module):
    """A small vision transformer."""

    def __init__(self, width: int = 384, depth: int = 8) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 8, 8)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.cut(x).flatten(2).transpose(1, 2)).mean(1)
        return self.head(out)  # type: ignore[no-any-return]


class Segments(nn.Module):
    """Down and up again, with a connection across, as a U-Net has it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(8, width), nn.GELU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.GELU())
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 3, padding=1), nn.GELU())
        self.head = nn.Conv2d(2 * width, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = self.down(x)
        out: Tensor = self.head(torch.cat([across, self.up(self.deep(across))], 1))
        return out.mean((2, 3))


def wide() -> nn.Module:
    """Linear layers in which weights weigh more than activations."""
    layers = [nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(4096, 10))


def pictures(num: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num, 3, side, side), torch.randint(10, (num,))


def photographs(num: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.randint(256, (num, 3, side, side), dtype=torch.uint8), torch.randint(10, (num,))


def tokens(num: int, length: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(65, (num, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass(frozen=True)
class Network:
    """What is trained, on how many samples a step."""

    make: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    batch: int


NETWORKS = {
    "resnet18": Network(lambda: ResNet18(Normalize(*BYTES)), lambda num: photographs(num, 64), 4096),
    "unet": Network(Segments, lambda num: pictures(num, 64), 2048),
    "gpt": Network(lambda: GPT(65, 256, 6, 6, 384), lambda num: tokens(num, 256), 512),
    "vit": Network(Patches, lambda num: pictures(num, 64), 2048),
    "lstm": Network(Sequences, lambda num: (torch.randn(num, 32, 64), torch.randint(10, (num,))), 8192),
    "mlp": Network(wide, lambda num: (torch.randn(num, 784), torch.randint(10, (num,))), 32768),
}
QUICK = ("mlp", "lstm")


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy; of tokens, over all positions."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def task_of(network: Network, batch: int) -> Task:
    torch.manual_seed(0)
    return Task(
        model=network.make,
        train=network.data(BATCHES * batch),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )


def case(name: str, precision: str, device: str, sizes: list[int]) -> list[dict[str, Any]]:
    """All sizes of one network and precision; runs in a process of its own."""
    is_gpu = device.startswith("cuda")
    network = NETWORKS[name]
    batch = network.batch if is_gpu else network.batch // 16
    task = task_of(network, batch)
    plan = Plan(batch=batch, devices=(device,), precision=precision, steps=STEPS, name=f"{name}-{precision}")  # type: ignore[arg-type]
    began = time.perf_counter()
    framework = workspace_bytes(torch.device(device)) if is_gpu else 0
    memory = step_memory(plan, task, batch, float(framework))
    seconds = time.perf_counter() - began
    place = placement(plan, STRATEGIES[REFERENCE], 1)
    rows = []
    shapes = memory
    for size in sizes:
        memory = calibrated(plan, task, shapes, batch, float(size))
        release(is_gpu)
        cut = largest_fitting(memory, place, usable(size))
        row: dict[str, Any] = {"network": name, "precision": precision, "size": size, "forecast_seconds": seconds}
        if cut is None:
            smallest = list(cuts(place.share))[-1]
            rows.append({**row, "needs": peak(memory, place, smallest.size).total, "fits": False})
            continue
        found = peak(memory, place, cut.size)
        # What cuBLAS keeps is there before the model is.
        found.kinds["framework"] = 0.0
        row |= {
            "from_shapes": peak(shapes, place, cut.size).total,
            "micro_batch": cut.size,
            "accumulate": cut.accumulate,
            "forecast": found.total,
            "kinds": found.kinds,
        }
        rows.append({**row, "fits": True, **train(plan, task, cut.accumulate, size)})
    return rows


def train(plan: Plan, task: Task, accumulate: int, size: int) -> dict[str, Any]:
    """The peak of real steps under a limit, or that they ran out of memory."""
    chosen = Plan(**{**vars(plan), "accumulate": accumulate})
    is_gpu = plan.devices[0].startswith("cuda")
    if is_gpu:
        limit_gpus(plan.devices, size + CONTEXT_BYTES)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for _ in perform(chosen, task, Path(folder), make=MemoryProbe):
                pass
            found = json.loads((Path(folder) / FILE).read_text())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"out_of_memory": True}
    finally:
        release(is_gpu)
        if is_gpu:
            limit_gpus(plan.devices, 2**62)
    return {"measured": found["growth_bytes"], "reserved": found["reserved_bytes"], "out_of_memory": False}


def release(is_gpu: bool) -> None:
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()


def cases(is_quick: bool, device: str) -> Iterator[tuple[str, str, str, list[int]]]:
    """What each process does; the first three sizes are those of the table."""
    draw = random.Random(0)
    if is_quick:
        for name in QUICK:
            yield name, "fp32", device, [GB // 2, GB]
        return
    for name, precision in product(NETWORKS, ("fp32", "bf16")):
        more = [int(draw.uniform(1.5, 10) * GB) for _ in range(MORE_SIZES)]
        yield name, precision, device, [*SIZES, *more]


def error(row: dict[str, Any]) -> float:
    return float(row["forecast"] / row["measured"] - 1)


def show(rows: list[dict[str, Any]], in_table: set[int]) -> dict[str, Any]:
    """The table, and what it amounts to."""
    print(f"{'network':<10}{'':<6}{'size':>7}{'samples':>14}{'forecast':>10}{'measured':>10}{'error':>8}   MB")
    errors = []
    for row in rows:
        measured = row.get("measured")
        if measured:
            errors.append(error(row))
        if row["size"] in in_table:
            cut = f"{row['micro_batch']} x {row['accumulate']}" if row["fits"] else "does not fit"
            numbers = f"{row['forecast'] / 1e6:>10,.0f}{measured / 1e6:>10,.0f}{error(row):>+8.1%}" if measured else ""
            print(f"{row['network']:<10}{row['precision']:<6}{row['size'] / 1e6:>7,.0f}{cut:>14}{numbers}")
    tabled = [error(row) for row in rows if row["size"] in in_table and row.get("measured")]
    summary = {
        "rows": len(tabled),
        "median_error": median(map(abs, tabled)),
        "worst_error": max(tabled, key=abs),
        "lowest_error": min(tabled),
        "too_low_by_over_5_percent": sum(one < -0.05 for one in tabled),
        "chosen": sum(row["fits"] for row in rows),
        "out_of_memory": sum(bool(row.get("out_of_memory")) for row in rows),
        "median_error_of_all_chosen": median(map(abs, errors)),
        "lowest_error_of_all_chosen": min(errors),
    }
    for name, value in summary.items():
        print(f"{name.replace('_', ' ')}: {f'{value:.1%}' if isinstance(value, float) else value}")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.quick:
        raise SystemExit("the full table needs a CUDA device; use --quick here")
    todo = list(cases(given.quick, device))
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    # A process for each case: on the CPU, a peak is that of a process.
    with ProcessPoolExecutor(AT_ONCE if device != "cpu" else 1, context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(case, *one) for one in todo]
        rows = [row for future in futures for row in future.result()]
    summary = show(rows, {GB // 2, GB} if given.quick else set(SIZES))
    print(f"{time.perf_counter() - began:.0f} s")
    if given.out is not None:
        command = shlex.join(["python", "bench/fit_gpu.py", *sys.argv[1:]])
        made = {
            "command": command,
            "machine": facts(),
            "networks": {name: asdict_of(one) for name, one in NETWORKS.items()},
        }
        given.out.write_text(json.dumps({**made, "summary": summary, "rows": rows}, indent=1) + "\n")


def asdict_of(network: Network) -> dict[str, Any]:
    return {"batch": network.batch, "parameters": sum(weight.numel() for weight in network.make().parameters())}


if __name__ == "__main__":
    main()
