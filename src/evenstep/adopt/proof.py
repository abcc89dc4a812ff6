"""Are the first steps of an adopted task those of the original? Both are run on one device and compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from evenstep.adopt.adopted import AdoptedTask, FirstSteps
from evenstep.checkpoint import files
from evenstep.distributed.devices import share_threads
from evenstep.errors import TaskError
from evenstep.launcher.launch import prepare_run, settings_kept, watch
from evenstep.record import Record
from evenstep.sampling.rng import derive_seed, replica_seed, seed_devices, seed_everything
from evenstep.strategy_facts import REFERENCE
from evenstep.task import call_task, find_task

EXAMPLE = "def task(): return evenstep.adopt.trainer(make_trainer)  # a function that makes your Trainer"


@dataclass(frozen=True)
class Proof:
    """How an adopted task compares with its original."""

    original: str
    """Its name."""
    differences: list[str]
    left_out: tuple[str, ...]


def compare_with_original(spec: str, options: Mapping[str, Any], num_steps: int) -> Proof:
    """Take the first steps of a task and of its original; weights, losses and weights are compared, in this order."""
    seed_everything(0)  # The seed of the run below, before the import: the file may draw its data.
    task = call_task(find_task(spec, EXAMPLE), None, options)
    if not isinstance(task, AdoptedTask) or task.original is None:
        raise TaskError(f"{spec} was not adopted: it has no original to be compared with; see evenstep.adopt")
    choices = {"options": dict(options), "strategy": REFERENCE, "devices": 1, "steps": num_steps, "fast": "off"}
    with settings_kept():
        prepared, rendezvous = prepare_run(spec, choices)
        start = _start(prepared.task.model().state_dict(), task.model().state_dict())
        if start:
            rendezvous.close()
            return Proof(task.original.name, start, task.left_out)
        record = watch(prepared, rendezvous, "nothing")
    assert record.path is not None
    ours = FirstSteps(record.losses, load_file(record.path.parent / files.FOLDER / "latest" / files.WEIGHTS))
    # A sum over more threads is rounded differently.
    threads = torch.get_num_threads()
    torch.set_num_threads(share_threads(record.plan.threads, record.plan.devices))
    try:
        seed_everything(record.plan.seed)
        theirs = task.original.first_steps(num_steps, task, partial(_seed, record))
    finally:
        torch.set_num_threads(threads)
    found = [*_losses(ours.losses, theirs.losses), *_weights(ours.weights, theirs.weights)]
    return Proof(task.original.name, found, task.left_out)


def _seed(record: Record, step: int) -> None:
    """Let the original draw the numbers of dropout that this step draws here."""
    plan, length = record.plan, record.data.get("rest")
    epoch, index = divmod(step, plan.steps_an_epoch(length) if length else step + 1)
    key = derive_seed(plan.seed, "dropout", epoch, 0)
    seed_devices([replica_seed(key, index * plan.batch, 0)], (torch.device(plan.devices[0]),))


def _start(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """Whether two calls of the task, after the same seed, make the same model."""
    for name, mine in ours.items():
        if name not in theirs or not torch.equal(mine, theirs[name]):
            return [
                f"the models differ before the first step: {name} is another one in each process; seed what draws it"
            ]
    return []


def _losses(ours: list[float], theirs: list[float]) -> list[str]:
    if len(ours) != len(theirs):
        return [f"{len(ours)} steps were taken, and {len(theirs)} by the original"]
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        # The original divides in float32.
        if np.float32(mine) != np.float32(other):
            apart = abs(mine - other) / (abs(other) or 1.0)
            return [
                f"step {step}: the loss is {mine!r}, and {other!r} in the original (relative difference {apart:.1g})"
            ]
    return []


def _weights(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    for name, mine in ours.items():
        if name not in theirs:
            return [f"the original has no {name}"]
        if not torch.equal(mine, theirs[name]):
            apart = float((mine - theirs[name]).abs().max() / (theirs[name].abs().max() or 1.0))
            return [f"{name} differs after the last step (max relative difference {apart:.1g})"]
    return []
