"""What a rank of a trial runs: a training that stops at a rung, saved, as if nothing else had been planned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenstep.plan import Plan
from evenstep.record import Evaluation
from evenstep.task import Task
from evenstep.training.trainer import Event, Trainer, perform


def train_to(plan: Plan, task: Task, run_folder: Path, *, epochs: int) -> Iterator[Event]:
    """Run the plan up to the evaluation after `epochs` epochs, and raise Preempted; a later start goes on from there.

    The plan is the whole one: a schedule of the learning rate is that of all epochs.
    """
    trainers: list[Trainer] = []

    def make(*given: Any) -> Trainer:
        trainers.append(Trainer(*given))
        return trainers[0]

    for event in perform(plan, task, run_folder, make=make):
        yield event
        if isinstance(event, Evaluation) and event.epoch + 1 >= epochs:
            # All ranks are at this event, so they agree; the trainer saves before it stops.
            requests = trainers[0].team.requests
            requests.stop = requests.stop_requested = True
