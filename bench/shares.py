"""Two ranks of `ddp`, one of which has half a core: equal shares against `--shares auto`, in turn. Linux, as root.

python bench/shares.py [PAIRS [OUT.json]]

Rank 1 puts itself into a control group with a quota of CPU time: half of each 10 ms. A step is the mean over the last
steps, after the shares were chosen. The weights of both runs are compared, in float64.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
from safetensors.torch import load_file

from evenstep.distributed import devices

STEPS, FIRST = 300, 180
PERIOD, QUOTA = 10_000, 5_000
"""Microseconds. With a period longer than a step, a rank is not slow: it runs at full speed, and then not at all."""
TASK = """
import os
from pathlib import Path
import torch
from torch import nn
from evenstep import Task

torch.manual_seed(0)
x, y = torch.randn(6400, 512), torch.randint(0, 10, (6400,))
is_limited = False


def loss(model, batch):
    global is_limited
    if os.environ.get("RANK") == "1" and not is_limited:
        is_limited = True
        Path(os.environ["CONTROL_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        train=(x, y),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        batch=512,
    )
"""


def make_control_group() -> Path:
    """With half a core; by the first version of control groups, or the second."""
    root = Path("/sys/fs/cgroup")
    group = root / ("cpu" if (root / "cpu").is_dir() else "") / f"evenstep-shares-{os.getpid()}"
    group.mkdir()
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{QUOTA} {PERIOD}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(QUOTA))
    return group


def trained(folder: Path, name: str, *more: str) -> Path:
    how = ("--strategy", "ddp", "--devices", "cpu,cpu", "--threads", "1", "--precision", "fp64", "--steps", str(STEPS))
    command = [sys.executable, "-m", "evenstep", "train", "task.py", *how, "--name", name, "--quiet", *more]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "runs" / name


def rows(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]


def step_ms(run: Path) -> float:
    """The mean of the last steps, less their wait for input."""
    steps = [row for row in rows(run) if row["kind"] == "step"]
    return 1e3 * statistics.fmean(row["seconds"] - row["input_seconds"] for row in steps[FIRST:])  # type: ignore[operator]


def furthest(one: Path, other: Path) -> float:
    """The largest difference of weights, relative to the largest of its tensor."""
    ours, theirs = (load_file(run / "checkpoints" / "latest" / "weights.safetensors") for run in (one, other))
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


def main(pairs: str = "5", out: str = "") -> None:
    found: dict[str, list[float]] = {"even": [], "auto": []}
    chosen, differences = [], []
    group = make_control_group()
    os.environ["CONTROL_GROUP"] = str(group)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "task.py").write_text(TASK)
            for number in range(int(pairs)):
                runs = {}
                for kind in random.sample(["even", "auto"], 2):
                    more = ("--shares", "auto") if kind == "auto" else ()
                    runs[kind] = trained(folder, f"{kind}{number}", *more)
                    found[kind].append(step_ms(runs[kind]))
                chosen += [row["shares"] for row in rows(runs["auto"]) if row["kind"] == "measuredshares"]
                differences.append(furthest(runs["auto"], runs["even"]))
    finally:
        group.rmdir()
    ratios = [even / auto for even, auto in zip(found["even"], found["auto"], strict=True)]
    result = {
        "command": f"python bench/shares.py {pairs}",
        "machine": devices.facts(),
        "load_average": os.getloadavg(),
        **{f"{kind}_step_ms": [round(one, 2) for one in values] for kind, values in found.items()},
        "shares": chosen,
        "largest_difference_of_weights": max(differences),
    }
    harness.write_pairs(out, result, "even_over_auto", ratios)


if __name__ == "__main__":
    main(*sys.argv[1:])
