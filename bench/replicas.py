"""What the comparison of replicas costs: one comparison against one DDP step, on 2 ranks with one thread each.

python bench/replicas.py [OUT.json]      on the CPU; a run compares every 100 steps
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import harness
import torch
from models import mlp
from torch.nn import functional as F

import evenstep
from evenstep.monitor.replica_check import ReplicaCheck
from evenstep.plan import USUAL

MODELS = {
    "MLP 784-256-10": lambda: mlp(784, 256, 10),
    "MLP of 10 M": lambda: mlp(784, 2900, 2600, 10),
}
BATCH = 128
ROUNDS, STEPS = 9, 10


def measure(name: str) -> tuple[float, float]:
    """Seconds of a step and of a comparison, on one of the ranks."""
    team = evenstep.join("ddp", ("cpu", "cpu"))
    torch.set_num_threads(1)
    data = (torch.randn(4 * BATCH, 784), torch.randint(10, (4 * BATCH,)))
    model = team.wrap(MODELS[name]())
    optimizer = torch.optim.Adam(model.parameters())
    check = ReplicaCheck(team.world, model.module)
    batch = next(iter(team.loader(data, BATCH, mine=True)))

    def step() -> None:
        team.backward(lambda net, data: F.cross_entropy(net(data[0]), data[1]), model, batch)
        team.step(optimizer)

    def seconds(what: Any, num: int) -> float:
        team.world.barrier()
        started = time.perf_counter()
        for _ in range(num):
            what()
        return (time.perf_counter() - started) / num

    seconds(step, STEPS), seconds(lambda: check.compare(1), 2)
    pairs = [(seconds(step, STEPS), seconds(lambda: check.compare(1), 5)) for _ in range(ROUNDS)]
    return median(one for one, _ in pairs), median(one for _, one in pairs)


def main() -> None:
    every = USUAL["check_every"]
    results = {}
    for name in MODELS:
        (step, compare), _ = evenstep.launch(measure, name, devices=2)
        share = compare / every / step
        results[name] = {"step_ms": step * 1e3, "compare_ms": compare * 1e3, "share_of_a_step": share}
        print(f"{name:<16} step {step * 1e3:8.3f} ms   comparison {compare * 1e3:7.3f} ms   every {every}: {share:.3%}")
    if len(sys.argv) > 1:
        harness.write(sys.argv[1], "python bench/replicas.py", results)


if __name__ == "__main__":
    main()
