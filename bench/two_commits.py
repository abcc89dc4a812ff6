"""The step of `ddp` on two CPU ranks, by the evenstep of two environments in turn: what a change costs.

python bench/two_commits.py BEFORE/.venv/bin/evenstep AFTER/.venv/bin/evenstep [PAIRS [OUT.json]]
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

STEPS, WARM_UP = 1000, 100
TASK = """
import torch
from torch import nn
from evenstep import Task

x, y = torch.randn(6400, 784), torch.randint(0, 10, (6400,))


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        train=(x, y),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch=128,
    )
"""


def step_ms(command: str, folder: Path, name: str) -> float:
    """The median of the steps after the first ones, less their wait for input."""
    how = ("--strategy", "ddp", "--devices", "cpu,cpu", "--steps", str(STEPS), "--name", name, "--json")
    subprocess.run([command, "train", "task.py", *how], cwd=folder, check=True, capture_output=True)
    rows = map(json.loads, (folder / "runs" / name / "record.jsonl").read_text().splitlines())
    seconds = [row["seconds"] - row["input_seconds"] for row in rows if "input_seconds" in row]
    return 1e3 * statistics.median(seconds[WARM_UP:])


def main(before: str, after: str, pairs: str = "8", out: str = "") -> None:
    found: dict[str, list[float]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task.py").write_text(TASK)
        for number in range(int(pairs)):
            for name, command in random.sample([("before", before), ("after", after)], 2):
                found[name].append(step_ms(command, Path(folder), f"{name}{number}"))
    ratios = [ours / theirs for ours, theirs in zip(found["after"], found["before"], strict=True)]
    result = {
        "command": f"python bench/two_commits.py BEFORE AFTER {pairs}",
        **{f"{name}_ms": [round(one, 3) for one in values] for name, values in found.items()},
    }
    harness.write_pairs(out, result, "after_over_before", ratios)


if __name__ == "__main__":
    main(*sys.argv[1:])
