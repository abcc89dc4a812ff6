"""The loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from evenstep.plan import Plan
from evenstep.record import Step
from evenstep.task import Task
from evenstep.worker.loader import Batch
from evenstep.worker.pulse import INPUT
from evenstep.worker.run import Run


def train(
    run: Run,
    task: Task,
    plan: Plan,
    peak_bytes: Callable[[], dict[str, int]],
    batches: Iterable[Batch] | None = None,
) -> Iterator[tuple[Step, list[int]]]:
    """Take optimizer steps until the plan is done, yielding what each one did; for an audit, on which samples too.

    On the loader's batches, unless others are given.
    """
    (model,) = run.models.values()
    (optimizer,) = run.optimizers.values()
    while not is_done(run, plan):
        for batch, started, arrived in _timed(run, run.loader if batches is None else batches):
            lr = float(optimizer.param_groups[0]["lr"])
            loss = run.team.backward(task.loss, model, batch)
            was_taken = run.team.step(optimizer, clip=plan.clip)
            if was_taken and run.scheduler is not None:
                run.scheduler.step()
            step = Step(
                step=run.step,
                epoch=batch.span.epoch,
                loss=loss,
                samples=batch.num_samples,
                count=run.team.last_count,
                seconds=time.perf_counter() - started,
                input_seconds=arrived - started,
                lr=lr,
                peak_bytes=peak_bytes(),
                epoch_samples=run.loader.lengths.of(batch.span.epoch) or 0,
            )
            yield step, batch.ids.tolist() if plan.audit else []
            if is_done(run, plan):
                return


def is_done(run: Run, plan: Plan) -> bool:
    """Whether the last step of the plan was taken."""
    if plan.steps is not None:
        return run.step >= plan.steps
    assert plan.epochs is not None
    return run.loader.epoch >= plan.epochs


def _timed(run: Run, source: Iterable[Batch]) -> Iterator[tuple[Batch, float, float]]:
    """Each batch with the times at which it was asked for and at which it was there."""
    batches = iter(source)
    pulse = run.team.world.pulse
    while True:
        pulse.step = run.step + 1
        pulse.beat(INPUT)
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, started, time.perf_counter()
