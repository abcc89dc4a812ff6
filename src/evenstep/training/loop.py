"""The loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from evenstep.data.loader import Batch
from evenstep.distributed.heartbeat import INPUT
from evenstep.plan import Plan
from evenstep.record import Step
from evenstep.training.run import Run
from evenstep.training.step import Stepper, Taken

LOOKED_AT = 64
"""Peaks of memory only ever grow: after the first steps they are looked at so often, which takes longer than a beat."""


class StepTaken(NamedTuple):
    """One row of the Record, and what does not stand there."""

    step: Step
    ids: list[int]
    """The samples, for an audit."""
    compute_seconds: float
    """As in `MeanLoss`."""


def train(
    run: Run,
    stepper: Stepper,
    plan: Plan,
    peak_bytes: Callable[[], dict[str, int]],
    batches: Iterable[Batch] | None = None,
    waits_at: Callable[[int], bool] = lambda step: False,
) -> Iterator[StepTaken]:
    """Take optimizer steps until the plan is done, yielding what each one did, in order.

    On the loader's batches, unless others are given. A stepper may be a few steps ahead of what is known of them; at
    the end of an epoch, at a step that somebody waits for, and when all processes agreed to stop or to save, the last
    step that was taken is also the last that is known.
    """
    (optimizer,) = run.optimizers.values()
    requests = run.team.requests
    under_way: deque[tuple[Taken, Callable[..., Step], list[int]]] = deque()
    peaks = peak_bytes()
    while not is_done(run, plan):
        for batch, started, arrived in _timed(run, run.loader if batches is None else batches):
            lr = float(optimizer.param_groups[0]["lr"])
            taken = stepper.take(batch)
            number = run.step
            ends = (plan.steps is not None or batch.is_epoch_end) and is_done(run, plan)
            is_last = ends or batch.is_epoch_end or waits_at(number)
            if is_last or number < LOOKED_AT or number % LOOKED_AT == 0:
                peaks = peak_bytes()
            step = partial(
                Step,
                step=number,
                epoch=batch.span.epoch,
                samples=batch.num_samples,
                seconds=time.perf_counter() - started,
                input_seconds=arrived - started,
                lr=lr,
                peak_bytes=peaks,
                epoch_samples=run.loader.lengths.of(batch.span.epoch) or 0,
            )
            under_way.append((taken, step, batch.ids.tolist() if plan.audit else []))
            while len(under_way) > (0 if is_last or requests.stop or requests.save else stepper.lag):
                yield _known(*under_way.popleft())
            if ends:
                return


def is_done(run: Run, plan: Plan) -> bool:
    """Whether the last step of the plan was taken."""
    if plan.steps is not None:
        return run.step >= plan.steps
    assert plan.epochs is not None
    return run.loader.epoch >= plan.epochs


def _known(taken: Taken, step: Callable[..., Step], ids: list[int]) -> StepTaken:
    loss = taken.read()
    return StepTaken(step(loss=float(loss), count=loss.count), ids, loss.compute_seconds)


def _timed(run: Run, source: Iterable[Batch]) -> Iterator[tuple[Batch, float, float]]:
    """Each batch with the times at which it was asked for and at which it was there."""
    batches = iter(source)
    heartbeat = run.team.world.heartbeat
    while True:
        heartbeat.step = run.step + 1
        heartbeat.beat(INPUT)
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, started, time.perf_counter()
