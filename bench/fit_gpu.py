"""G5: the memory of a step, forecast, beside what real steps take; and chosen micro-batches that must fit.

python bench/fit_gpu.py [--quick] [--allocators] [--only NETWORK ...] [--out FILE]

6 networks x 2 precisions x 3 sizes of a GPU, then more sizes.

Everything is done as `fit` and `train --micro auto` do it, each in a fresh process: one forecast from shapes for each
network and precision; for each size real steps with a part of the samples, which correct it; probes of the micro-batch
that is chosen, at most three; and a training with it. `set_per_process_memory_fraction` makes the GPU smaller. None of
over 100 choices may run out of memory. With --allocators, what would be chosen without room for gaps is tried too, with
torch's allocator as it is and with expandable segments. Without a GPU (--quick), two networks on the CPU: the peak
is that of the process, and no size is enforced.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep import Task
from evenstep.distributed.devices import facts
from evenstep.fit.device_memory import CONTEXT_BYTES, limit_gpus, warm_up, workspace_bytes
from evenstep.fit.fake_tensor_pass import calibrated, step_memory
from evenstep.fit.memory_model import Cut, Placement, StepMemory, cuts, largest_fitting, peak, usable
from evenstep.fit.memory_probe import MemoryProbe, ProbedMemory, read_probe
from evenstep.launcher.fit_micro_batch import MemoryRunner, RanOut, Search, placement
from evenstep.monitor.known_errors import is_out_of_memory
from evenstep.plan import Plan
from evenstep.strategy_facts import REFERENCE, STRATEGIES
from evenstep.tasks.networks import GPT, Normalize, ResNet18
from evenstep.training.trainer import Trainer, perform

GB = 10**9
SIZES = (2 * GB, 4 * GB, 8 * GB)
"""Of the emulated GPUs, for the allocator: what CUDA itself takes is on top."""
MORE_SIZES = 6
AT_ONCE = 10
"""Processes; memory is measured, and time only within pairs."""
STEPS = 3
BATCHES = 4
"""Of an epoch: the next ones are read while a step runs."""
DIFFERENT = 256
"""Samples; the others repeat them."""
BYTES = ([125.307, 122.950, 113.865], [62.993, 62.089, 66.705])
"""Mean and deviation of photographs."""
EXPANDABLE = "expandable_segments:True"


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
    "resnet18": Network(lambda: ResNet18(Normalize(*BYTES)), lambda num: photographs(num, 64), 512),
    "unet": Network(Segments, lambda num: pictures(num, 64), 1024),
    "gpt": Network(lambda: GPT(65, 256, 6, 6, 384), lambda num: tokens(num, 256), 256),
    "vit": Network(Patches, lambda num: pictures(num, 64), 1024),
    "mlp": Network(wide, lambda num: (torch.randn(num, 784), torch.randint(10, (num,))), 65536),
    "lstm": Network(Sequences, lambda num: (torch.randn(num, 32, 64), torch.randint(10, (num,))), 8192),
}
QUICK = ("mlp", "gpt")


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy; of tokens, over all positions."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


@dataclass(frozen=True)
class Case:
    """A network and a precision on a device."""

    network: str
    precision: str
    device: str

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def batch(self) -> int:
        batch = NETWORKS[self.network].batch
        return batch if self.is_gpu else batch // 16

    @property
    def plan(self) -> Plan:
        how: dict[str, Any] = {"precision": self.precision, "name": f"{self.network}-{self.precision}"}
        return Plan(batch=self.batch, devices=(self.device,), steps=STEPS, **how)

    @property
    def place(self) -> Placement:
        return placement(self.plan, STRATEGIES[REFERENCE], 1)

    def task(self) -> Task:
        torch.manual_seed(0)
        network = NETWORKS[self.network]
        times = -(-BATCHES * self.batch // DIFFERENT)
        return Task(
            model=network.make,
            train=tuple(one.repeat(times, *[1] * (one.ndim - 1)) for one in network.data(DIFFERENT)),
            loss=loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        )


def forecast(case: Case) -> StepMemory:
    """From shapes alone."""
    if case.is_gpu:
        framework = workspace_bytes(torch.device(case.device))
    else:
        warm_up()
        framework = 0
    return step_memory(case.plan, case.task(), case.batch, float(framework))


def corrected(case: Case, memory: StepMemory, size: int) -> StepMemory:
    if case.is_gpu:
        workspace_bytes(torch.device(case.device))
    else:
        warm_up()
    return calibrated(case.plan, case.task(), memory, case.batch, float(size))


def probed(case: Case, accumulate: int, size: int, settings: str = "") -> ProbedMemory | None:
    """What a probe measures; None if it runs out of memory."""
    if settings:
        torch._C._accelerator_setAllocatorSettings(settings)
    with tempfile.TemporaryDirectory() as folder:
        if not ran(case, replace(case.plan, accumulate=accumulate), size, Path(folder), MemoryProbe):
            return None
        return read_probe(Path(folder))


def trained(case: Case, accumulate: int, size: int) -> dict[str, Any]:
    """As `train` does it, with CUDA graphs where it uses them."""
    steps = max(STEPS, min(12, 24 // accumulate))
    with tempfile.TemporaryDirectory() as folder:
        fits = ran(case, replace(case.plan, accumulate=accumulate, steps=steps), size, Path(folder), Trainer)
    if not case.is_gpu:
        return {"out_of_memory": not fits}
    stats = torch.cuda.memory_stats(case.device)
    kept = {"peak": "allocated_bytes.all.peak", "reserved": "reserved_bytes.all.peak", "retries": "num_alloc_retries"}
    return {"out_of_memory": not fits, **{name: stats[key] for name, key in kept.items()}}


def ran(case: Case, plan: Plan, size: int, folder: Path, make: type[Trainer]) -> bool:
    """Whether steps under a limit had enough memory."""
    if case.is_gpu:
        limit_gpus(plan.devices, size + CONTEXT_BYTES)
    try:
        for _ in perform(plan, case.task(), folder, make=make):
            pass
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


@cache
def starter() -> Any:
    """Processes that have imported everything, and used no GPU yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__ if __name__ != "__main__" else "__main__", "evenstep.training.trainer"])
    return context


def fresh(do: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a process of its own."""
    here, there = starter().Pipe(duplex=False)
    process = starter().Process(target=_send, args=(there, do, arguments))
    process.start()
    there.close()
    try:
        found, problem = here.recv()
    except EOFError:
        found, problem = None, "the process ended without a word"
    process.join()
    if problem:
        raise RuntimeError(f"{do.__name__}{arguments}: {problem}")
    return found


def _send(there: Any, do: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(2)
    try:
        there.send((do(*arguments), ""))
    except Exception:
        there.send((None, traceback.format_exc()))


class FreshProbes(MemoryRunner):
    """Probes as `fit` makes them, of networks that have no file."""

    def __init__(self, case: Case, size: int) -> None:
        self.case, self.size, self.limit = case, size, size + CONTEXT_BYTES

    def probe(self, cut: Cut, **changes: Any) -> ProbedMemory | RanOut:
        return fresh(probed, self.case, cut.accumulate, self.size) or RanOut(None)


def row_of(case: Case, shapes: StepMemory, size: int, in_table: bool, allocators: bool) -> dict[str, Any]:
    """One size: what is forecast, what is chosen, and what it takes."""
    row: dict[str, Any] = {"network": case.network, "precision": case.precision, "size": size, "in_table": in_table}
    began = time.perf_counter()
    memory: StepMemory = fresh(corrected, case, shapes, size)
    row |= {"seconds_to_correct": time.perf_counter() - began, "gaps": memory.gaps}
    search = Search(FreshProbes(case, size), case.place, memory, float(size), {})
    first = search.expected()
    if first is None:
        smallest = list(cuts(case.place.share))[-1]
        return {**row, "needs": peak(memory, case.place, smallest.size).total, "chosen": None}
    cut = search.largest()
    row |= {
        "probes": [asdict(one) for one in search.tried],
        "chosen": asdict(cut) if cut is not None else None,
        "from_shapes": peak(shapes, case.place, first.size).total,
        "kinds": peak(memory, case.place, (cut or first).size).kinds,
    }
    if cut is not None:
        row["trained"] = fresh(trained, case, cut.accumulate, size)
    if allocators and in_table and case.is_gpu:
        row["without_gaps"] = bare(case, replace(memory, gaps=0.0), size)
    return {**row, "seconds": time.perf_counter() - began}


def bare(case: Case, memory: StepMemory, size: int) -> dict[str, Any]:
    """What would be chosen without room for gaps, with both kinds of allocator."""
    cut = largest_fitting(memory, case.place, usable(size))
    if cut is None:
        return {}
    found: dict[str, Any] = {"micro_batch": cut.size, "accumulate": cut.accumulate}
    for name, settings in (("plain", ""), ("expandable", EXPANDABLE)):
        done = fresh(probed, case, cut.accumulate, size, settings)
        found[name] = asdict(done) if done is not None else None
    return found


def cases(is_quick: bool, device: str) -> Iterator[tuple[Case, list[int], int]]:
    """Networks, their sizes, and how many of these are in the table."""
    draw = random.Random(0)
    if is_quick:
        for name in QUICK:
            yield Case(name, "fp32", device), [GB // 2, GB], 2
        return
    for name, precision in product(NETWORKS, ("fp32", "bf16")):
        more = [int(draw.uniform(1.5, 10) * GB) for _ in range(MORE_SIZES)]
        yield Case(name, precision, device), [*SIZES, *more], len(SIZES)


def first_probe(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (row.get("probes") or [{}])[0]
    return found


def last_probe(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (row.get("probes") or [{}])[-1]
    return found


def error(row: dict[str, Any]) -> float | None:
    """Of the forecast of the first micro-batch, or of the next one if that ran out of memory."""
    for one in row.get("probes", ()):
        if one["growth_bytes"]:
            return float(one["forecast_bytes"] / one["growth_bytes"] - 1)
    return None


HEAD = (
    f"{'network':<10}{'':<6}{'size':>7}{'samples':>12}{'shapes':>8}{'forecast':>9}{'measured':>9}{'error':>8}"
    f"{'gaps':>6}{'probes':>7}{'trained':>9}{'reserved':>9}  activations/inputs; without gaps: plain, expandable   MB"
)


def line_of(row: dict[str, Any]) -> str:
    first = f"{row['network']:<10}{row['precision']:<6}{row['size'] / 1e6:>7,.0f}"
    if not row.get("probes"):
        return f"{first} does not fit: {row['needs'] / 1e6:,.0f}"
    one, wrong, done = last_probe(row), error(row), row.get("trained", {})
    after = "out!" if done.get("out_of_memory") else mega(done.get("peak"))
    kinds = row["kinds"]
    return (
        f"{first}{one['micro_batch']:>7} x{one['accumulate']:>3}{mega(row['from_shapes']):>8}"
        f"{mega(one['forecast_bytes']):>9}{mega(one['growth_bytes'], 'out'):>9}"
        f"{f'{wrong:+.1%}' if wrong is not None else '-':>8}{row['gaps']:>6.2f}{len(row['probes']):>7}"
        f"{after:>9}{mega(done.get('reserved')):>9}  {mega(kinds['activations'])}/{mega(kinds['inputs'])}"
        f"{words_of(row.get('without_gaps'))}"
    )


def mega(value: float | None, otherwise: str = "-") -> str:
    return f"{value / 1e6:,.0f}" if value else otherwise


def words_of(tried: dict[str, Any] | None) -> str:
    if not tried:
        return ""
    parts = []
    for name in ("plain", "expandable"):
        one = tried[name]
        taken = f"{mega(one['peak_bytes'])} of {mega(one['reserved_bytes'])}" if one else "out"
        parts.append(f"{taken}, {one['step_seconds']:.3f} s" if one else taken)
    return f"; {tried['micro_batch']} x {tried['accumulate']}: {'; '.join(parts)}"


def summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tabled = [one for row in rows if row["in_table"] and (one := error(row)) is not None]
    every = [one for row in rows if (one := error(row)) is not None]
    bare_ones = [row["without_gaps"] for row in rows if row.get("without_gaps")]
    pairs = [
        one["expandable"]["step_seconds"] / one["plain"]["step_seconds"]
        for one in bare_ones
        if one["plain"] and one["expandable"]
    ]
    return {
        "rows": len(tabled),
        "median_error": median(map(abs, tabled)),
        "worst_error": max(tabled, key=abs),
        "lowest_error": min(tabled),
        "too_low_by_over_5_percent": sum(one < -0.05 for one in tabled),
        "median_error_of_all": median(map(abs, every)),
        "lowest_error_of_all": min(every),
        "forecasts_that_ran_out_of_memory": sum(
            bool(row.get("probes")) and first_probe(row)["measured_bytes"] is None for row in rows
        ),
        "chosen_after_probes": sum(row["chosen"] is not None for row in rows),
        "chosen_that_ran_out_of_memory": sum(bool(row.get("trained", {}).get("out_of_memory")) for row in rows),
        "median_gaps": median(row["gaps"] for row in rows),
        "without_gaps_out_of_memory": sum(one["plain"] is None for one in bare_ones),
        "without_gaps_expandable_out_of_memory": sum(one["expandable"] is None for one in bare_ones),
        "expandable_step_time": median(pairs) if pairs else None,
    }


def all_rows(todo: list[tuple[Case, list[int], int]], at_once: int, allocators: bool) -> list[dict[str, Any]]:
    """Forecasts first, then all sizes, several at once."""
    with ThreadPoolExecutor(at_once) as pool:
        # The last ones take longest: torch counts an RNN step by step.
        shapes = {case: pool.submit(fresh, forecast, case) for case, *_ in reversed(todo)}
        # The sizes of the table first, of all networks.
        found = [
            pool.submit(_later, case, shapes[case], sizes[index], index < num, allocators)
            for index in range(max(len(sizes) for _, sizes, _ in todo))
            for case, sizes, num in todo
        ]
        return [future.result() for future in found]


def _later(case: Case, shapes: Any, size: int, in_table: bool, allocators: bool) -> dict[str, Any]:
    try:
        row = row_of(case, shapes.result(), size, in_table, allocators)
    except RuntimeError as problem:
        # One that breaks is shown, and the others go on.
        print(case, size, problem, flush=True)
        return {"network": case.network, "precision": case.precision, "size": size, "problem": str(problem)}
    print(line_of(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--allocators", action="store_true", help="what would be chosen without room for gaps, too")
    parser.add_argument("--only", nargs="+", default=[], help="networks")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = "cuda:0" if torch.cuda.device_count() else "cpu"
    if device == "cpu" and not given.quick:
        raise SystemExit("the full table needs a CUDA device; use --quick here")
    began = time.perf_counter()
    print(HEAD)
    todo = [one for one in cases(given.quick, device) if not given.only or one[0].network in given.only]
    rows = all_rows(todo, AT_ONCE if device != "cpu" else 1, given.allocators)
    whole = [row for row in rows if "problem" not in row]
    summary = {**summed_up(whole), "broken": len(rows) - len(whole), "seconds": round(time.perf_counter() - began)}
    for name, value in summary.items():
        print(f"{name.replace('_', ' ')}: {f'{value:.1%}' if isinstance(value, float) else value}")
    if given.out is not None:
        command = shlex.join(["python", "bench/fit_gpu.py", *sys.argv[1:]])
        networks = {name: asdict_of(one) for name, one in NETWORKS.items()}
        made = {"command": command, "machine": facts(), "networks": networks}
        given.out.write_text(json.dumps({**made, "summary": summary, "rows": rows}, indent=1) + "\n")


def asdict_of(network: Network) -> dict[str, Any]:
    return {"batch": network.batch, "parameters": sum(weight.numel() for weight in network.make().parameters())}


if __name__ == "__main__":
    main()
