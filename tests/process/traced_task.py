"""A task whose steps take long enough to be looked into; `MISHAP` says what goes wrong with those who look.

Tests copy this file beside their runs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep import Task
from evenstep.distributed.world import read_heartbeat

RUN = Path("runs/one")
HAPPENED = Path("happened")
MISHAP = os.environ.get("MISHAP", "")
WIDTH = int(os.environ.get("WIDTH", "256"))
x = torch.randn(240, WIDTH, generator=torch.Generator().manual_seed(0))
y = (x[:, :3].sum(1) > 0).long()
heartbeat = read_heartbeat()


def task() -> Task:
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return Task(
        model=lambda: nn.Sequential(*layers, nn.Linear(WIDTH, 2)),
        train=(x[:200], y[:200]),
        valid=(x[200:], y[200:]),
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        batch=50,
        epochs=3,
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if torch.is_grad_enabled() and MISHAP:
        MISHAPS[MISHAP](int(os.environ.get("RANK", "0")), heartbeat.read().step)
    return F.cross_entropy(model(batch[0]), batch[1])


def kill(rank: int, step: int) -> None:
    """Rank 1 dies at step 6, once."""
    if rank == 1 and step == 6 and not HAPPENED.exists():
        HAPPENED.touch()
        os.abort()


def kill_twice(rank: int, step: int) -> None:
    """Rank 1 dies at step 6, and at step 9."""
    happened = Path(f"happened{step}")
    if rank == 1 and step in (6, 9) and not happened.exists():
        happened.touch()
        os.abort()


def hold(rank: int, step: int) -> None:
    """Nothing goes wrong here; after some steps, something goes wrong elsewhere until there is a file `go`."""
    while step > 4 and not Path("go").exists():
        time.sleep(0.05)


def no_folder(rank: int, step: int) -> None:
    """A file is where the folder of traces would be."""
    if RUN.is_dir() and not (RUN / "traces").exists():
        (RUN / "traces").touch()


def no_file(rank: int, step: int) -> None:
    """A folder is where rank 1 would write its trace."""
    if rank == 1 and step == 1:
        (RUN / "traces" / "rank1.json.gz").mkdir(parents=True)


def no_tensorboard(rank: int, step: int) -> None:
    """A file is where TensorBoard's folder was, or would be."""
    folder = RUN / "tensorboard"
    if folder.is_dir():
        shutil.rmtree(folder)
    if RUN.is_dir():
        folder.touch()


def told(rank: int, step: int) -> None:
    """Nothing goes wrong; what this rank has imported by now is written down."""
    trackers = ("tensorboard", "mlflow", "evenstep.trackers.tracker_process")
    Path(f"imported{rank}").write_text(json.dumps([name for name in trackers if name in sys.modules]))


def followed(rank: int, step: int) -> None:
    """Nothing goes wrong; how nice the process is that feeds the tracker is written down once it is nice."""
    folder = str(RUN.absolute())
    while (RUN / "trackers").is_dir() and not Path("niceness").exists():
        for process in psutil.process_iter(["cmdline", "nice"]):
            if folder in (process.info["cmdline"] or ()) and process.info["nice"] == 19:
                autogroup = Path(f"/proc/{process.pid}/autogroup")
                Path("niceness").write_text(autogroup.read_text() if autogroup.exists() else "no autogroups")
        time.sleep(0.1)


MISHAPS = {
    "kill": kill,
    "kill twice": kill_twice,
    "hold": hold,
    "no folder": no_folder,
    "no file": no_file,
    "no tensorboard": no_tensorboard,
    "none, but who is here": told,
    "none, but who follows": followed,
}
