"""The training loop: it yields what each step did, and prints nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from evenstep.data.loader import Batch
from evenstep.distributed.heartbeat import INPUT
from evenstep.plan import Plan
from evenstep.record import Step
from evenstep.training.checkpointed_run import Run
from evenstep.training.step import Stepper, Taken

PEAKS_EVERY = 64
"""After as many steps, peak memory, which only grows, is read once per as many steps: reading it is not free."""


Pending: TypeAlias = tuple[Taken, dict[str, Any], list[int]]
"""A step whose loss is not known yet, the other fields of its row, and the samples for an audit."""


class StepTaken(NamedTuple):
    """A row of the Record, and what is not written there."""

    step: Step
    ids: list[int]
    """The samples, for an audit."""
    compute_seconds: float
    """As in `MeanLoss`."""
    is_rest: bool = False
    """Whether a later step has failed: its error is raised next, and other ranks may not be here."""


def train(
    run: Run,
    stepper: Stepper,
    plan: Plan,
    peak_bytes: Callable[[], dict[str, int]],
    batches: Iterable[Batch] | None = None,
    waits_at: Callable[[int], bool] = lambda step: False,
) -> Generator[StepTaken]:
    """Take optimizer steps until the plan is done, yielding what each one did, in order.

    It uses the loader's batches unless others are given. A stepper may run a few steps ahead of the losses that are
    known; at the end of an epoch, where `waits_at` is true, and when all processes agreed to stop or to save, the loss
    of the last step is known. Where a step fails, those before it are yielded first, as far as they are known.
    """
    optimizer = next(iter(run.optimizers.values()))
    requests = run.team.requests
    pending: deque[Pending] = deque()
    peaks = peak_bytes()
    try:
        while not is_done(run, plan):
            for batch, started, arrived in _timed(run, run.loader if batches is None else batches):
                lr = float(optimizer.param_groups[0]["lr"])
                taken = stepper.take(batch)
                number = run.step
                ends = (plan.steps is not None or batch.is_epoch_end) and is_done(run, plan)
                is_last = ends or batch.is_epoch_end or waits_at(number)
                if is_last or number < PEAKS_EVERY or number % PEAKS_EVERY == 0:
                    peaks = peak_bytes()
                times = {"seconds": time.perf_counter() - started, "input_seconds": arrived - started}
                fields = {**_begun_fields(run, batch, number), **times, "lr": lr, "peak_bytes": peaks}
                pending.append((taken, fields, batch.ids.tolist() if plan.audit else []))
                if stepper.lag and batch.is_epoch_end and not ends:
                    run.loader.prepare(batch.span.epoch + 1)
                while len(pending) > (0 if is_last or requests.stop or requests.save else stepper.lag):
                    row = _known(*pending[0])
                    pending.popleft()
                    yield row
                if ends:
                    return
    except Exception:
        yield from _rest(run, pending)
        raise


def is_done(run: Run, plan: Plan) -> bool:
    """Whether the plan's last step was taken."""
    if plan.steps is not None:
        return run.step >= plan.steps
    assert plan.epochs is not None
    return run.loader.epoch >= plan.epochs


def _rest(run: Run, pending: deque[Pending]) -> Iterator[StepTaken]:
    """The steps before one that failed, up to a loss that is not finite: from there on, no step changed the weights."""
    communication, requests = run.team.world.communication, run.team.requests
    before = communication.is_off, requests.agreed
    while pending:
        # Other ranks may not have failed: nothing here may wait for them, or be agreed with them.
        communication.is_off = True
        try:
            row = _known(*pending.popleft())
        except Exception:
            return
        finally:
            communication.is_off, requests.agreed = before
        if not math.isfinite(row.step.loss):
            return
        yield row._replace(is_rest=True)


def _begun_fields(run: Run, batch: Batch, number: int) -> dict[str, int]:
    """Those of a Step that depend on the batch."""
    epoch = batch.span.epoch
    length = run.loader.lengths.of(epoch) or 0
    return {"step": number, "epoch": epoch, "samples": batch.num_samples, "epoch_samples": length}


def _known(taken: Taken, fields: dict[str, Any], ids: list[int]) -> StepTaken:
    loss = taken.read()
    row = Step(**fields, loss=float(loss), count=loss.count, logged=loss.logged, grad_norm=loss.grad_norm)
    return StepTaken(row, ids, loss.compute_seconds)


def _timed(run: Run, source: Iterable[Batch]) -> Iterator[tuple[Batch, float, float]]:
    """Each batch with the times at which it was requested and at which it arrived."""
    batches = iter(source)
    spans = run.team.world.spans
    while True:
        spans.heartbeat.step = run.step + 1
        spans.begin(INPUT)
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, started, time.perf_counter()
