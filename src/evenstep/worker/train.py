"""The loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from evenstep.plan import Plan
from evenstep.record import Step
from evenstep.task import Task
from evenstep.worker.loader import Batch, Loader
from evenstep.worker.run import Run


def train(run: Run, task: Task, plan: Plan, peak_bytes: Callable[[], dict[str, int]]) -> Iterator[Step]:
    """Take optimizer steps until the plan is done, yielding what each one did."""
    (model,) = run.models.values()
    (optimizer,) = run.optimizers.values()
    num_steps = run.num_steps or plan.num_steps(run.loader.num_samples)
    while run.step < num_steps:
        for batch, started, arrived in _timed(run.loader):
            lr = float(optimizer.param_groups[0]["lr"])
            loss = run.team.backward(task.loss, model, batch)
            was_taken = run.team.step(optimizer, clip=plan.clip)
            if was_taken and run.scheduler is not None:
                run.scheduler.step()
            yield Step(
                step=run.step,
                epoch=batch.span.epoch,
                loss=loss,
                samples=batch.num_samples,
                count=run.team.last_count,
                seconds=time.perf_counter() - started,
                input_seconds=arrived - started,
                lr=lr,
                peak_bytes=peak_bytes(),
            )
            if run.step == num_steps:
                return


def _timed(loader: Loader) -> Iterator[tuple[Batch, float, float]]:
    """Each batch with the times at which it was asked for and at which it was there."""
    batches = iter(loader)
    while True:
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, started, time.perf_counter()
