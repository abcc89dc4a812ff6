"""Running a prepared plan, in this process or in many, and watching it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

import torch

from evenstep import checkpoint
from evenstep.errors import EvenstepError, PlanError, Preempted
from evenstep.launcher.alone import ended_if_stalled
from evenstep.launcher.failure import cause, report, stopped_where
from evenstep.launcher.prepare import Prepared
from evenstep.launcher.ready import Ready, get_ready
from evenstep.launcher.supervise import Supervisor, of_plan
from evenstep.launcher.traces import with_trace
from evenstep.plan import Plan
from evenstep.record import KINDS, Record
from evenstep.report.progress import Progress
from evenstep.seeding import host_state, restore_host_state
from evenstep.task import Task, TaskFunction
from evenstep.worker.ahead import worker_ends_told
from evenstep.worker.job import Event
from evenstep.worker.later import put_off_compiler
from evenstep.worker.main import WORKER, write_report
from evenstep.worker.perform import perform
from evenstep.worker.strategies import STRATEGIES


def train(task: str | TaskFunction | Task, *, progress: bool = True, **choices: Any) -> Record:
    """Train a task and return its Record; the choices are the fields of a Plan, and may be left out.

    record = evenstep.train(task, strategy="ddp", devices=2, batch=512, epochs=10)
    """
    if WORKER in os.environ:
        raise PlanError(
            "evenstep.train was called by a worker that imports your script; let the script alone call it:\n"
            'if __name__ == "__main__": evenstep.train(...)'
        )
    unknown = set(choices) - set(CHOICES)
    if unknown:
        raise PlanError(f"unknown {', '.join(sorted(unknown))}; train takes {', '.join(CHOICES)}")
    with _settings_kept():
        return watch(get_ready(task, choices), progress)


ELSEWHERE = "what was saved is on the first machine"


def watch(ready: Ready, progress: bool, is_command: bool = False) -> Record:
    """Carry the plan out, show how it goes, and read back what it wrote.

    A command may end its own process when nothing moves any more; a notebook's must live on.
    """
    prepared = ready.prepared
    if is_command:
        put_off_compiler()
    with Progress(prepared.num_steps, quiet=not progress, is_bare=not ready.is_first) as shown:
        try:
            events = run(ready, is_command)
            if prepared.plan.profile is not None and ready.is_first:
                events = with_trace(events, prepared.folder)
            with worker_ends_told():
                for event in events:
                    shown.show(event)
        except KeyboardInterrupt:
            shown.say(stopped_where(prepared.folder) if ready.is_first else f"stopped; {ELSEWHERE}")
            raise
        except Preempted as error:
            if ready.slurm is not None and prepared.plan.requeue and ready.is_first:
                shown.say(ready.slurm.requeue())
            is_saved = bool(checkpoint.whole(prepared.folder / checkpoint.FOLDER))
            how = f"go on with --resume {prepared.folder}" if is_saved else "nothing was saved yet"
            raise Preempted(f"{error}; {how if ready.is_first else ELSEWHERE}") from None
    # The Record is where rank 0 was, which may be on another machine.
    if not ready.is_first:
        return Record(prepared.plan)
    return Record.read(prepared.folder, kinds=("summary",) if is_command else KINDS)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """A training in this process must not change how the user's own torch computes afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    flags = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    tf32 = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    generator, host = torch.get_rng_state(), host_state()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
        torch.set_rng_state(generator)
        restore_host_state(host)


CHOICES = (*(field.name for field in fields(Plan) if field.name != "task"), "plan")


def run(ready: Ready, ends_stalls: bool = False) -> Iterator[Event]:
    """Carry the plan out, yielding what happens as it happens."""
    prepared, plan = ready.prepared, ready.prepared.plan
    if not STRATEGIES[plan.strategy].processes_per_device and not plan.restarts:
        ready.meeting.close()
        return _in_this_process(prepared, ends_stalls)
    if prepared.spec is None:
        refuse_fork_after_cuda()
    return Supervisor(of_plan(prepared), ready.meeting).events()


def _in_this_process(prepared: Prepared, ends_stalls: bool) -> Iterator[Event]:
    logs = prepared.folder / "logs"
    try:
        plan = replace(prepared.plan, resume=prepared.resume or prepared.plan.resume)
        folder = prepared.folder.absolute()
        stalls = ended_if_stalled(folder / "logs", plan.stall_after) if ends_stalls else nullcontext()
        with stalls, chdir(prepared.cwd):
            yield from perform(plan, prepared.task, folder, signal.SIGINT)
    except EvenstepError:
        raise
    except (Exception, SystemExit) as error:
        write_report(logs, 0, error)
        raise report([cause(logs, {0: 1}, {})], prepared.folder) from error


def refuse_fork_after_cuda() -> None:
    """A card that this process has opened cannot be used by a copy of it."""
    if torch.cuda.is_initialized():
        raise PlanError(
            "this process has used CUDA already, and a process that has cannot be copied for ddp or fsdp.\n"
            "Put the task in a file and pass 'file.py', or restart the notebook and train before touching the card"
        )
