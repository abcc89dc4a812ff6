"""Learning-rate schedules: made with the lengths of the run, and stepped after steps, epochs or evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenstep.best_metric import parse_best
from evenstep.errors import PlanError, TaskError
from evenstep.plan import Plan
from evenstep.sampling.order import Lengths
from evenstep.task import ScheduleEvery, ScheduleLength, Task, lengths_taken
from evenstep.typed_values import check_choice

if TYPE_CHECKING:
    import torch

SteppedAfter = Literal["step", "epoch", "evaluation"]
STREAM = {
    "num_steps": "the scheduler takes the number of steps, and a stream has no length; give --steps",
    "steps_per_epoch": "the scheduler takes the steps of an epoch, and a stream has no length; write a number",
}


class Schedulers:
    """One for each of several optimizers."""

    def __init__(self, parts: Mapping[str, LRScheduler]) -> None:
        self.parts: dict[str, Any] = dict(parts)

    def step(self, *metric: float) -> None:
        """Step all of them."""
        for one in self.parts.values():
            one.step(*metric)

    def state_dict(self) -> dict[str, Any]:
        return {key: one.state_dict() for key, one in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Those that the state has; another one begins."""
        for key in self.parts.keys() & state.keys():
            self.parts[key].load_state_dict(state[key])


def make_scheduler(
    task: Task, optimizers: Mapping[str, torch.optim.Optimizer], plan: Plan, lengths: Lengths, num_steps: int | None
) -> LRScheduler | Schedulers | None:
    """The task's scheduler, or those of several optimizers, if it has any."""
    if task.scheduler is None:
        return None
    check_choice("schedule_every", task.schedule_every, get_args(ScheduleEvery), TaskError)
    per_epoch = plan.steps_an_epoch(lengths.rest) if lengths.rest is not None else None
    known: dict[ScheduleLength, int | None] = {"num_steps": num_steps, "steps_per_epoch": per_epoch}
    if not isinstance(task.scheduler, Mapping):
        return _made(task.scheduler, next(iter(optimizers.values())), known)
    if "" in optimizers:
        raise TaskError("Task.scheduler is a dict, and there is one optimizer; give the function itself")
    return Schedulers({key: _made(make, optimizers[key], known) for key, make in task.scheduler.items()})


def _made(
    make: Callable[..., LRScheduler], optimizer: torch.optim.Optimizer, known: Mapping[ScheduleLength, int | None]
) -> LRScheduler:
    """A scheduler, given the lengths that it takes."""
    taken = lengths_taken(make)
    unknown = [length for length in taken.values() if known[length] is None]
    if unknown:
        raise PlanError(STREAM[unknown[0]])
    return make(optimizer, **{name: known[length] for name, length in taken.items()})


def check_scheduler(scheduler: LRScheduler | Schedulers | None, plan: Plan, task: Task) -> None:
    """Refuse a ReduceLROnPlateau that has no evaluations, or looks for the wrong end of the metric."""
    every = list(scheduler.parts.values()) if isinstance(scheduler, Schedulers) else [scheduler]
    waiting = [one for one in every if isinstance(one, ReduceLROnPlateau)]
    if not waiting:
        return
    if len(waiting) < len(every):
        raise TaskError(
            "some of Task.scheduler count steps, and ReduceLROnPlateau waits for evaluations; use one kind for all"
        )
    if task.valid is None:
        raise TaskError(
            "ReduceLROnPlateau is stepped after each evaluation, and the task has no data for one; "
            "give it: Task(..., valid=data)"
        )
    metric, direction = parse_best(plan.best)
    for one in waiting:
        if one.mode != direction:
            raise TaskError(
                f"ReduceLROnPlateau waits for a {one.mode} of {metric}, whose {direction} is best; write "
                f"ReduceLROnPlateau(optimizer, mode={direction!r}), or name another metric: Task(best=...) or --best"
            )


def stepped_after(scheduler: LRScheduler | Schedulers | None, task: Task) -> SteppedAfter:
    """What the scheduler counts."""
    first = next(iter(scheduler.parts.values()), None) if isinstance(scheduler, Schedulers) else scheduler
    return "evaluation" if isinstance(first, ReduceLROnPlateau) else task.schedule_every
