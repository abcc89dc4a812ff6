"""Learning-rate schedules: made with the lengths of the run, and stepped after steps, epochs or evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenstep.errors import PlanError, TaskError
from evenstep.plan import Plan, parse_best
from evenstep.sampling.order import Lengths
from evenstep.schema import check_choice
from evenstep.task import ScheduleEvery, ScheduleLength, Task, lengths_taken
from evenstep.training.run import SteppedAfter

if TYPE_CHECKING:
    import torch

STREAM = {
    "num_steps": "the scheduler takes the number of steps, and a stream has no length; give --steps",
    "steps_per_epoch": "the scheduler takes the steps of an epoch, and a stream has no length; write a number",
}


def make_scheduler(
    task: Task, optimizer: torch.optim.Optimizer, plan: Plan, lengths: Lengths, num_steps: int | None
) -> LRScheduler | None:
    """The task's scheduler, if it has one, given the lengths that it takes."""
    if task.scheduler is None:
        return None
    check_choice("schedule_every", task.schedule_every, get_args(ScheduleEvery), TaskError)
    per_epoch = plan.steps_an_epoch(lengths.rest) if lengths.rest is not None else None
    known: dict[ScheduleLength, int | None] = {"num_steps": num_steps, "steps_per_epoch": per_epoch}
    taken = lengths_taken(task.scheduler)
    unknown = [length for length in taken.values() if known[length] is None]
    if unknown:
        raise PlanError(STREAM[unknown[0]])
    return task.scheduler(optimizer, **{name: known[length] for name, length in taken.items()})


def check_scheduler(scheduler: LRScheduler | None, plan: Plan, task: Task) -> None:
    """Refuse a ReduceLROnPlateau that has no evaluations, or looks for the wrong end of the metric."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        return
    if task.valid is None:
        raise TaskError(
            "ReduceLROnPlateau is stepped after each evaluation, and the task has no data for one; "
            "give it: Task(..., valid=data)"
        )
    metric, direction = parse_best(plan.best)
    if scheduler.mode != direction:
        raise TaskError(
            f"ReduceLROnPlateau waits for a {scheduler.mode} of {metric}, whose {direction} is best; "
            f"write ReduceLROnPlateau(optimizer, mode={direction!r}), or name another metric: Task(best=...) or --best"
        )


def stepped_after(scheduler: LRScheduler | None, task: Task) -> SteppedAfter:
    """What the scheduler counts."""
    return "evaluation" if isinstance(scheduler, ReduceLROnPlateau) else task.schedule_every
