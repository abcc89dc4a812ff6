"""A small task that counts its process's bytes at `COUNTED` steps, and in which rank 0 is killed at step 40, once.

`FAULT=record`: the second line of the Record is no JSON from then until step 50. `FAULT=checkpoint`: the checkpoints
are those of an evenstep that wrote no sums into them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Task
from evenstep.distributed.world import read_heartbeat

RUN = Path("runs/long")
RANK = os.environ.get("RANK", "0")
COUNTED = [int(step) for step in os.environ.get("COUNTED", "").split()]
x = torch.randn(int(os.environ.get("SAMPLES", "96")), 4, generator=torch.Generator().manual_seed(0))
calls = 0


def loss(model: nn.Module, batch: Any) -> Tensor:
    global calls
    if model.training and torch.is_grad_enabled():
        calls += 1
        count_bytes()
        happen(read_heartbeat().read().step)
    inputs, sums = batch
    return (model(inputs) - sums).square().mean()


def count_bytes() -> None:
    if COUNTED and calls == 1:
        tracemalloc.start()
    if calls in COUNTED:
        gc.collect()
        with Path(f"bytes.{RANK}").open("a") as file:
            file.write(f"{tracemalloc.get_traced_memory()[0]}\n")


def happen(step: int) -> None:
    fault = os.environ.get("FAULT")
    if fault is None or RANK != "0" or step not in (40, 50):
        return
    is_first = step == 40 and not Path("died").exists()
    if fault == "record" and (is_first or step == 50):
        write_second_line(is_damaged=is_first)
    if is_first:
        if fault == "checkpoint":
            age_checkpoints()
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def write_second_line(is_damaged: bool) -> None:
    record = RUN / "record.jsonl"
    first, second = record.read_bytes().splitlines()[:2]
    if is_damaged:
        Path("second").write_bytes(second)
    with record.open("r+b") as file:
        file.seek(len(first) + 1)
        file.write(b"x" * len(second) if is_damaged else Path("second").read_bytes())


def age_checkpoints() -> None:
    for path in RUN.glob("checkpoints/step-*/state.json"):
        state = json.loads(path.read_text())
        del state["so_far"]
        path.write_text(json.dumps(state))
        sums = path.with_name("SHA256SUMS")
        others = [line for line in sums.read_text().splitlines() if not line.endswith(path.name)]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        sums.write_text("\n".join([*others, f"{digest}  {path.name}", ""]))


def task() -> Task:
    return Task(
        model=lambda: nn.Linear(4, 1),
        train=(x, x.sum(1, keepdim=True)),
        valid=(x[:8], x[:8].sum(1, keepdim=True)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=4,
        epochs=3,
    )
