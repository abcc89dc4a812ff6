"""Evaluate a checkpoint again: on other data, on other devices, or with other metrics."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenstep.checkpoint import files, integrity
from evenstep.errors import CheckpointError, Preempted
from evenstep.launcher.launch import run_in_processes
from evenstep.launcher.prepare import named_task, prepare
from evenstep.plan import Plan
from evenstep.record import Record
from evenstep.task import Task
from evenstep.training.trainer import Event, Trainer, perform


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """What an evaluation gave, and of which checkpoint."""

    checkpoint: str
    step: int
    values: dict[str, float]
    samples: int
    seconds: float


def evaluate(
    where: str, source: str | None, choices: Mapping[str, Any], log: Callable[[list[str]], None]
) -> EvaluatedCheckpoint:
    """Evaluate a run's newest checkpoint, or the given one, by its own plan but for the choices."""
    path, notes = integrity.find(where)
    state = files.read_state(path)
    plan = state.get("plan")
    if not plan:
        raise CheckpointError(
            f"{path} was saved by a custom loop, which has no Task to evaluate; call team.evaluate in that loop"
        )
    if source is None:
        source = named_task(plan.get("task"), "evaluate", where)
    # As the run did, which evaluates the average of the weights if it has one.
    weights = path / files.EMA if (path / files.EMA).exists() else path / files.WEIGHTS
    choices = {**choices, "plan": plan, "resume": str(weights)}
    prepared = prepare(source, choices, is_training=False)
    log([*notes, *prepared.notes])
    only = replace(prepared.plan, restarts=0, audit=False, log=None)
    try:
        for _ in run_in_processes(replace(prepared, plan=only), perform_evaluation):
            pass
        (evaluation,) = Record.read(prepared.folder).evaluations
    except (KeyboardInterrupt, Preempted):
        shutil.rmtree(prepared.folder, ignore_errors=True)
        raise
    # After a failure, its logs stay.
    shutil.rmtree(prepared.folder, ignore_errors=True)
    shown = os.path.relpath(path)
    return EvaluatedCheckpoint(
        str(path) if shown.startswith("..") else shown,
        state["step"],
        evaluation.values,
        evaluation.samples,
        evaluation.seconds,
    )


def perform_evaluation(plan: Plan, task: Task, run_folder: Path) -> Iterator[Event]:
    """What a worker does instead of training."""
    return perform(plan, task, run_folder, make=EvaluationRun)


class EvaluationRun(Trainer):
    """One evaluation of the weights that the plan names."""

    def resume(self) -> list[str]:
        """Load the weights; what is said about training does not matter here."""
        super().resume()
        return []

    def events(self) -> Iterator[Event]:
        """The evaluation alone; a request to stop ends it, with nothing to save."""
        evaluation = self._evaluate(0, can_stop=True)
        if evaluation is None:
            raise Preempted("stopped")
        yield evaluation
