"""Do the parts of a step add up to the step, and is what it sends worth what the parts say?

python bench/parts.py [--device cuda:0] [--rounds 5] [--tasks wide_mlp] [--out FILE]

For each task and way: the whole step by the wall clock, with nothing timed inside it, beside the sum of its parts, as
`evenstep compare` measures them; and the step that sends nothing beside the whole less the communication that the parts
show. Then DistributedDataParallel by itself, with torch's own `noop_hook`: the same ceiling, found without evenstep.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from harness import Ratio, compared, show, write
from models import MLP_10M, SIMPLE_NET

from evenstep import Task
from evenstep.compare.measure import Block, measure
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import prepare
from evenstep.launcher.script import launch
from evenstep.record import PARTS, Measurement, Record

WAYS = (("single", 1), ("dp", 2), ("ddp", 2), ("fsdp", 2))
ON_ONE_GPU = (("single", 1), ("dp", 2), ("ddp", 2), ("fsdp", 1))
"""fsdp needs a card for each process."""
BATCH = {"simple_net": 128, "wide_mlp": 64, "small_cnn": 64, "encoder": 64}


def simple_net() -> Task:
    """The tutorials' network for MNIST, on random pictures."""
    return _task(SIMPLE_NET.network, (784,), "simple_net")


def wide_mlp() -> Task:
    """10 million parameters: what it sends is most of the step."""
    return _task(MLP_10M.network, (1024,), "wide_mlp")


def small_cnn() -> Task:
    """The tutorials' network for CIFAR-10: what it computes is most of the step."""

    def model() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(800, 120), nn.ReLU(), nn.Linear(120, 10)),
        )

    return _task(model, (3, 32, 32), "small_cnn")


def encoder() -> Task:
    """A layer of a transformer."""

    def model() -> nn.Module:
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(16 * 128, 10))

    return _task(model, (16, 128), "encoder")


def _task(model: Callable[[], nn.Module], shape: tuple[int, ...], name: str) -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, *shape, generator=generator)
    y = torch.randint(10, (8192,), generator=generator)
    return Task(
        model=model,
        train=(x, y),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        batch=BATCH[name],
    )


def measured(name: str, strategy: str, devices: tuple[str, ...], block: Block, folder: Path) -> Measurement:
    """One block, in processes of its own."""
    base = prepare(f"{__file__}:{name}", {"name": f"parts-{time.monotonic_ns()}", "devices": list(devices[:1])})
    prepared = variant(base, folder, strategy=strategy, devices=devices, steps=block.plan_steps)
    for _ in run_in_processes(prepared, partial(measure, block=block)):
        pass
    found = Record.read(folder).measurement
    shutil.rmtree(folder)
    shutil.rmtree(base.folder)
    assert found is not None
    return found


def raw_ddp(name: str, device: str, steps: int) -> float:
    """Milliseconds of a step of plain DDP that sends nothing; called in every rank."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = globals()[name]()
    x, y = (tensor.to(device) for tensor in task.train)
    model = DistributedDataParallel(task.model().to(device), gradient_as_bucket_view=True)
    optimizer = task.optimizer(model.parameters())
    model.register_comm_hook(None, noop_hook)
    share = BATCH[name] // 2
    seconds = []
    for step in range(steps + 10):
        begin = time.perf_counter()
        rows = torch.arange(step * share, (step + 1) * share) % len(x)
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    dist.destroy_process_group()
    return median(seconds[10:]) * 1000


Blocks = dict[tuple[str, int], list[Measurement]]


def collected(name: str, device: str, rounds: int) -> Blocks:
    """A block of each way for every round, forwards and backwards in turn."""
    block = Block(warm_up=10, steps=60, special=40)
    configs = WAYS if device == "cpu" else ON_ONE_GPU
    blocks: Blocks = {config: [] for config in configs}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(rounds):
            for config in configs[:: 1 if number % 2 == 0 else -1]:
                folder = Path(temporary) / f"{config[0]}-{number}"
                blocks[config].append(measured(name, config[0], (device,) * config[1], block, folder))
    return blocks


def whole_ms(one: Measurement, device: str) -> float:
    """A step by the wall clock; on a card the host's times of single steps mean little, and together they are right."""
    seconds = one.step_seconds
    return 1000 * (median(seconds) if device == "cpu" else sum(seconds) / len(seconds))


def add_up(found: list[Measurement], device: str) -> tuple[Ratio, dict[str, float]]:
    """The sum of the parts over the whole, and each part in milliseconds."""
    sums = [1000 * sum(one.parts.values()) for one in found]
    parts = {part: 1000 * median(one.parts[part] for one in found) for part in PARTS}
    return compared([whole_ms(one, device) for one in found], sums), parts


def ceiling(found: list[Measurement]) -> Ratio | None:
    """What the parts leave without communication over a step that sends nothing."""
    bare = [1000 * (one.without_communication_seconds or 0.0) for one in found]
    left = [1000 * (sum(one.parts.values()) - one.parts["communication"]) for one in found]
    return compared(bare, left) if all(bare) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", default=list(BATCH))
    parser.add_argument("--out", default="parts.json")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    rows, ceilings = [], []
    # First of all: a process that has used CUDA cannot be copied any more.
    silent = {
        name: [launch(raw_ddp, name, given.device, 60, devices=2)[0] for _ in range(given.rounds)]
        for name in given.tasks
    }
    for name in given.tasks:
        blocks = collected(name, given.device, given.rounds)
        for (strategy, num), found in blocks.items():
            config = f"{strategy} x {num}"
            ratio, parts = add_up(found, given.device)
            shown = [f"{parts[part]:.2f}" for part in PARTS]
            rows.append([name, config, f"{ratio.first:.2f}", f"{ratio.ratio:.3f}", ratio.interval, *shown])
            results[f"{name}, {config}"] = {"parts_over_whole": ratio.figures("ms"), "parts_ms": parts}
            bare = ceiling(found)
            if bare is not None:
                results[f"{name}, {config}"]["left_over_bare"] = bare.figures("ms")
                ceilings.append(
                    [name, config, f"{bare.first:.2f}", f"{bare.second:.2f}", f"{bare.ratio:.3f}", bare.interval]
                )
        ours = [1000 * (one.without_communication_seconds or 0.0) for one in blocks["ddp", 2]]
        raw = compared(silent[name], ours)
        results[f"{name}, DDP with noop_hook"] = {"ours_over_raw": raw.figures("ms")}
        ceilings.append([name, "DDP, noop_hook", f"{raw.first:.2f}", "", "", f"ours is {raw.ratio:.2f} x that"])
    show("\nThe parts of a step", ["task", "way", "whole, ms", "sum / whole", "95 %", *PARTS], rows)
    heads = ["task", "way", "sends nothing, ms", "whole less comm., ms", "ratio", "95 %"]
    show("\nA step that sends nothing", heads, ceilings)
    write(given.out, f"python bench/parts.py {shlex.join(sys.argv[1:])}".strip(), results)


if __name__ == "__main__":
    main()
