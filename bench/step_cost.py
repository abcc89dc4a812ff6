"""What a step costs beyond the training itself: the same loop written by hand, and by evenstep.

python bench/step_cost.py [OUT.json]      on the CPU with one thread, or on the first CUDA card

Blocks are interleaved A B B A in one process; a figure is the median of per-block ratios with a bootstrap 95 %
interval. "raw again" is the raw loop against itself: no claim smaller than its spread. Losses are compared first.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.worker.machine import facts

BATCH = 256
STEPS_A_BLOCK = 200
ROUNDS = 12
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"

generator = torch.Generator().manual_seed(0)
x = torch.randn(BATCH * 8, 20, generator=generator).to(DEVICE)
y = torch.randint(0, 5, (BATCH * 8,), generator=generator).to(DEVICE)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


def adam(model: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def raw(wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Callable[[], float]:
    """The loop that people write by hand, on the same batches in the same order."""
    model = wrap(network().to(DEVICE))
    optimizer = adam(model)
    order = evenstep_loader("single", (DEVICE,))[1]

    def block() -> float:
        last = torch.zeros(())
        for _ in range(STEPS_A_BLOCK // 8):
            for batch in order:
                last = loss(model, batch.micro_batches[0][0].data)
                last.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return last.item()

    return block


def evenstep_loader(strategy: str, devices: tuple[str, ...]) -> tuple[object, object]:
    team = evenstep.join(strategy, devices)
    return team, team.loader((x, y), batch=BATCH)


def ours(strategy: str, devices: tuple[str, ...]) -> Callable[[], float]:
    team, loader = evenstep_loader(strategy, devices)
    model = team.spread(network())
    optimizer = adam(model)

    def block() -> float:
        last = 0.0
        for _ in range(STEPS_A_BLOCK // 8):
            for batch in loader:
                last = team.backward(loss, model, batch)
                team.step(optimizer)
        return last

    return block


def timed(block: Callable[[], float]) -> float:
    started = time.perf_counter()
    block()
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS_A_BLOCK * 1e3


def race(first: Callable[[], float], second: Callable[[], float]) -> dict[str, float]:
    """Milliseconds of both, and the ratio second / first with its interval."""
    if abs(first() - second()) > 1e-3:
        raise SystemExit("the two loops did not learn the same; no race")
    pairs = []
    for number in range(ROUNDS):
        order = (first, second) if number % 2 == 0 else (second, first)
        times = {block: timed(block) for block in order}
        pairs.append((times[first], times[second]))
    ratios = [b / a for a, b in pairs]
    draws = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "first_ms": statistics.median(a for a, _ in pairs),
        "second_ms": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "low": draws[50],
        "high": draws[-51],
    }


def main() -> None:
    random.seed(0)
    torch.set_num_threads(1)
    races = {
        "raw again": (raw(), raw()),
        "single": (raw(), ours("single", (DEVICE,))),
        "ddp, one rank": (raw(), ours("ddp", (DEVICE,))),
        "dp, the device twice": (raw(), ours("dp", (DEVICE, DEVICE))),
    }
    if DEVICE != "cpu":
        races["dp / nn.DataParallel, the card twice"] = (
            raw(lambda model: nn.DataParallel(model, device_ids=[0, 0])),
            ours("dp", (DEVICE, DEVICE)),
        )
    results = {name: race(*blocks) for name, blocks in races.items()}
    table = Table("against the raw loop", "raw ms", "ms", "ratio", "95 %", box=None)
    for name, row in results.items():
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        table.add_row(name, f"{row['first_ms']:.3f}", f"{row['second_ms']:.3f}", f"{row['ratio']:.3f}", interval)
    Console(width=100).print(f"MLP 20-64-5, batch {BATCH}, fused Adam, {DEVICE}", table)
    if len(sys.argv) > 1:
        command = "python bench/step_cost.py"
        Path(sys.argv[1]).write_text(json.dumps({"command": command, "machine": facts(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
