"""What a step costs beyond the training itself: the same loop written by hand, and by evenstep.

python bench/step_cost.py [OUT.json]      on the CPU with one thread, or on the first CUDA card

The ratios are of interleaved blocks (harness.py). "raw again" is the raw loop against itself: no claim smaller than its
spread. Losses are compared first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import harness
import torch
from torch import nn
from torch.nn import functional as F

import evenstep

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


def race(first: Callable[[], float], second: Callable[[], float]) -> harness.Ratio:
    """Milliseconds of both, and the ratio second / first with its interval."""
    if abs(first() - second()) > 1e-3:
        raise SystemExit("the two loops did not learn the same; no race")
    return harness.race(lambda: timed(first), lambda: timed(second), ROUNDS)


def main() -> None:
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
    harness.show(
        f"MLP 20-64-5, batch {BATCH}, fused Adam, {DEVICE}",
        ("against the raw loop", "raw ms", "ms", "ratio", "95 %"),
        (
            (name, f"{row.first:.3f}", f"{row.second:.3f}", f"{row.ratio:.3f}", row.interval)
            for name, row in results.items()
        ),
    )
    if len(sys.argv) > 1:
        as_json = {name: row.figures("ms") for name, row in results.items()}
        harness.write(sys.argv[1], "python bench/step_cost.py", as_json)


if __name__ == "__main__":
    main()
