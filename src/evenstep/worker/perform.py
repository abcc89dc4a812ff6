"""Carrying a Job out: joining the others, writing the Record, and what becomes of an error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from evenstep.errors import BadInput, TrainingError
from evenstep.plan import Plan
from evenstep.record import RecordWriter
from evenstep.task import Task
from evenstep.worker import machine
from evenstep.worker.ahead import is_worker_end, worker_ends_told
from evenstep.worker.collectives import check_collectives
from evenstep.worker.everywhere import everywhere, forget_copies
from evenstep.worker.job import Event, Job
from evenstep.worker.notes import note
from evenstep.worker.pulse import ENDING
from evenstep.worker.requests import SIGNALS
from evenstep.worker.team import join_team
from evenstep.worker.trackers import start_tracking


def perform(
    plan: Plan, task: Task, run_folder: Path, *more_signals: signal.Signals, make: Callable[..., Job] = Job
) -> Iterator[Event]:
    """Run the plan in this process (one of several, or alone), yielding what happens; rank 0 writes the Record.

    In a folder that has a Record already, the run goes on in it. SIGTERM, SIGUSR1 and SIGHUP, and `more_signals`, ask
    it to stop: at a step that all processes agree on it saves, and raises Preempted. `make` makes a Job that does
    something else than train.
    """
    set_up_torch(plan)
    team = join_team(plan.strategy, plan.devices, plan.precision, plan.seed, needs_group=False)
    if plan.check_collectives:
        check_collectives(team.world)
    plan = replace(plan, resume=everywhere(team.world, plan.resume))
    with team.requests.listening(*SIGNALS, *more_signals), worker_ends_told():
        yield from _perform(make(plan, task, run_folder, team))


def _perform(job: Job) -> Iterator[Event]:
    team = job.team
    yield from job.resume()
    forget_copies()
    record: RecordWriter | None = None
    if team.world.is_main:
        record = RecordWriter(job.folder, job.plan, machine.facts(), job.facts)
        job.run.before_save = record.flush
    tracking = start_tracking(job.beginning, team.world.is_main)
    try:
        for event in job.events():
            if record is not None and not isinstance(event, str):
                record.append(event)
                yield from tracking.take(event) if tracking is not None else ()
            yield event
        if record is not None:
            record.flush()
        team.world.pulse.beat(ENDING)
        # Nobody leaves while another still reads what it sent.
        team.world.barrier()
    except BadInput as error:
        if job.run.step == 0:
            raise
        # Bad input is what is refused before anything is started; this was met on the way.
        raise TrainingError(f"at step {job.run.step + 1}: {error}") from error
    except Exception as error:
        if is_worker_end(error):
            raise
        note(error, job.run.step + 1, job.trainable_names(), job.situation(error))
        raise
    finally:
        job.close()
        if tracking is not None:
            tracking.close()
        if record is not None:
            record.close()


def set_up_torch(plan: Plan) -> None:
    """Settings of this process, before anything is computed."""
    torch.set_num_threads(machine.share_threads(plan.threads, plan.devices))
    if plan.deterministic:
        # cuBLAS asks for this, and reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = plan.deterministic
    torch.backends.cudnn.benchmark = plan.cudnn_benchmark
