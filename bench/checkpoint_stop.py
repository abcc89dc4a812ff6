"""How long saving a sharded model stops a training, and how much memory it takes, beside gathering whole tensors.

evenstep run --devices 4 bench/checkpoint_stop.py [FOLDER]

36 layers of 1024 x 1024 with AdamW: 450 MB. Each round saves twice: as fsdp does (rows written by all ranks, the rest
in the background) and as it was before (every tensor gathered on rank 0, written, hashed, flushed). Shown are medians,
and by how much the peak of a rank grew. The first should stop for at most a tenth of the second, and take no more
memory than a layer. From the second round on, a checkpoint is written over the files of one that would be deleted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.checkpoint.state_dict import optimizer_state, weights, whole

ROUNDS = 7
WIDTH, LAYERS = 1024, 36


def reset_peak() -> int:
    """Bytes that this process holds, from which its peak is measured."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def gathered_save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, is_main: bool) -> None:
    """Whole tensors on rank 0, one file each for weights and optimizer, hashed and flushed."""
    for name, tensors in (("weights", weights(model)), ("optimizer", optimizer_state(model, optimizer)[0])):
        taken = {key: whole(value, is_main) for key, value in tensors.items() if isinstance(value, torch.Tensor)}
        kept = {key: value for key, value in taken.items() if value is not None}
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}.safetensors"
            save_file(kept, path)
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())


def measured(team: evenstep.Team, work: Callable[[], object]) -> tuple[float, int]:
    """Seconds until all ranks go on, and the growth of this rank's peak."""
    team.world.barrier()
    before = reset_peak()
    started = time.perf_counter()
    work()
    team.world.barrier()
    return time.perf_counter() - started, status_bytes("VmHWM") - before


def main(folder: Path) -> None:
    """Save in both ways, and print how they differ."""
    team = evenstep.join("fsdp")
    model = team.wrap(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = evenstep.Run(team, model, optimizer)
    data = torch.randn(4 * team.world.size, WIDTH)
    for batch in team.loader((data,), batch=len(data)):
        team.backward(lambda model, batch: F.mse_loss(model(batch[0]), batch[0]), model, batch)
        team.step(optimizer)
    rows: dict[str, list[tuple[float, int]]] = {"shards": [], "finishing": [], "whole": []}
    for _ in range(ROUNDS):
        rows["shards"].append(measured(team, lambda: run.save(folder / "shards", in_background=True)))
        rows["finishing"].append(measured(team, run.settle))
        whole_save = lambda: gathered_save(model.module, optimizer, folder / "whole", team.world.is_main)  # noqa: E731
        rows["whole"].append(measured(team, whole_save))
    grown = {name: max(team.world.gather(max(one[1] for one in found))) for name, found in rows.items()}
    usual = {name: statistics.median(one[0] for one in found[2:]) for name, found in rows.items()}
    if team.world.is_main:
        for name, found in rows.items():
            times = f"{usual[name] * 1000:.0f} ms, {found[0][0] * 1000:.0f} ms for the first"
            print(f"{name}: {times}; peak of a rank + {grown[name] / 1e6:.0f} MB")
        print(f"stops for {usual['shards'] / usual['whole']:.1%} of gathering; a layer is {4 * WIDTH**2 / 1e6:.0f} MB")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "evenstep-checkpoint-stop")
