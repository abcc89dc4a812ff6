"""Run a training: make a command ready (on one machine, several, or under Slurm), carry it out, and show its progress.

A prepared training can also be run in several configurations, each in a folder of its own:

base = prepare("digits", {"name": "choice"})
two = variant(base, base.folder / "ddp-2", strategy="ddp", devices=("cpu", "cpu"), steps=20)
for event in run_in_processes(two): ...
Record.read(two.folder)
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

import torch

from evenstep.checkpoint import files, integrity
from evenstep.data.prefetch import explain_worker_death
from evenstep.distributed.devices import count_processes, share_threads, threads_for_replicas
from evenstep.distributed.worker_process import read_rank, worker_spec
from evenstep.errors import BadInput, CheckpointError, EvenstepError, PlanError, Preempted, TrainingError, shorten
from evenstep.launcher.failure import cause, report, stopped_where
from evenstep.launcher.hang import FIRST_SECONDS, LEAST_SECONDS, exit_on_stall
from evenstep.launcher.logs import with_trace
from evenstep.launcher.prepare import Prepared, label_of, out_of_resumed, prepare, prepare_from_plan, write_plan
from evenstep.launcher.rendezvous.rank_assignment import LocalRendezvous, Rendezvous
from evenstep.launcher.rendezvous.slurm import Slurm, find_slurm
from evenstep.launcher.rendezvous.version_check import Identity, identity_of, sources_of_task
from evenstep.launcher.supervisor import Launch, StopSignals, Supervisor
from evenstep.launcher.variables import launcher_variables
from evenstep.plan import RUNS, Plan, parse_log, parse_rendezvous, read_plan
from evenstep.record import KINDS, Record, RunEnd, write_end
from evenstep.report.terminal import Progress
from evenstep.sampling.rng import host_state, restore_host_state
from evenstep.strategy_facts import REFERENCE, STRATEGIES, added_strategies, with_processes
from evenstep.task import Task, TaskFunction
from evenstep.training.trainer import Event, perform
from evenstep.worker.lazy_compiler import put_off_compiler
from evenstep.worker.main import Perform, TrainingSpec, work, write_report

if TYPE_CHECKING:
    from evenstep.launcher.rendezvous.pods import ElasticNode

Source = Union[str, "TaskFunction", Task, None]
OWN = ("devices",)
"""Choices that may differ between the machines of one run."""
CONTINUE = "auto"
"""For --resume: the run of that name, if it has begun."""


def prepare_run(source: Source, choices: Mapping[str, Any]) -> tuple[Prepared, Rendezvous]:
    """Check everything, and connect to the other machines if there are any."""
    # Refuse rank variables that no worker could read before one is started.
    read_rank()
    node = _elastic_node()
    # Pods, and what Ray starts, may be inside a job of Slurm.
    slurm = find_slurm() if node is None else None
    chosen = dict(choices)
    continues = chosen.get("resume") == CONTINUE
    if continues:
        del chosen["resume"]
    elif chosen.get("resume") is not None and chosen.get("out") is None:
        chosen["out"] = out_of_resumed(chosen["resume"])
    is_head = None
    if node is not None and chosen.get("machines") is None:
        chosen, is_head = _for_node(node, chosen), node.is_head
    elif slurm is not None:
        chosen, is_head = _for_slurm(slurm, source, chosen), slurm.task == 0 if slurm.has_several_tasks else None
    if chosen.get("requeue") and slurm is None:
        raise PlanError("--requeue needs a Slurm job, and this is not one; --restarts continues after a crash")
    if continues and not chosen.get("name"):
        raise PlanError(f"--resume {CONTINUE} continues the run that --name names; give a --name")
    begun = partial(_begun, source, chosen, continues or (slurm is not None and slurm.num_restarts > 0))
    if chosen.get("machines") is None:
        prepared = begun() or prepare(source, chosen)
        if prepared.plan.micro is not None:
            from evenstep.launcher.fit_micro_batch import with_micro_batch

            prepared = with_micro_batch(prepared)
        return prepared, LocalRendezvous()
    return _with_machines(source, chosen, begun, _identity(source, choices, slurm), is_head)


def _identity(source: Source, choices: Mapping[str, Any], slurm: Slurm | None) -> Identity:
    """What all machines of a run have in common: the command, the job and the code.

    Nothing derived from them: the name of the run depends on which folders exist.
    """
    given = {name: str(value) for name, value in choices.items() if value is not None and name not in OWN}
    job = {"job": f"{slurm.job}.{slurm.step}"} if slurm is not None else {}
    command = {"command": "train", "task": str(source), **given, **job}
    sources = sources_of_task(source) if isinstance(source, str) else {}
    return identity_of(command, sources)


def _with_machines(
    source: Source,
    chosen: dict[str, Any],
    begun: Callable[[], Prepared | None],
    identity: Identity,
    is_head: bool | None,
) -> tuple[Prepared, Rendezvous]:
    from evenstep.launcher.rendezvous.elastic import C10dRendezvous  # what it imports is not needed on one machine

    where = parse_rendezvous(str(chosen["machines"]), chosen.get("rendezvous"))
    assert where is not None
    rendezvous = C10dRendezvous(*where, identity, is_head)
    try:
        if not rendezvous.is_head:
            return prepare_from_plan(rendezvous.read_plan(), source, chosen), rendezvous
        prepared = begun() or prepare(source, chosen)
        if not prepared.is_importable:
            raise PlanError("on many machines a task comes from a file or a module, as in evenstep train my_task.py")
    except EvenstepError as error:
        if rendezvous.is_head:
            rendezvous.refuse(str(error))
        rendezvous.close()
        raise
    rendezvous.publish(prepared.plan)
    return replace(prepared, notes=[*prepared.notes, *rendezvous.warnings]), rendezvous


def _elastic_node() -> ElasticNode | None:
    """The node that torchrun's variables describe, if they are set."""
    if not launcher_variables().PET_NNODES:
        return None
    from evenstep.launcher.rendezvous.pods import find_elastic_node

    return find_elastic_node()


def _for_node(node: ElasticNode, choices: Mapping[str, Any]) -> dict[str, Any]:
    """The choices, with defaults from torchrun's variables."""
    chosen = {name: value for name, value in choices.items() if value is not None}
    if node.processes and chosen.get("strategy") != REFERENCE:
        chosen.setdefault("devices", str(count_processes(node.processes, "PET_NPROC_PER_NODE")))
    if node.has_several:
        chosen |= {"machines": node.machines, "rendezvous": node.rendezvous}
    return chosen


def _for_slurm(slurm: Slurm, source: Source, choices: Mapping[str, Any]) -> dict[str, Any]:
    """The choices, with defaults from Slurm's environment."""
    chosen = {name: value for name, value in choices.items() if value is not None}
    if source is not None:
        chosen.setdefault("name", _job_name(slurm, label_of(source), Path(chosen.get("out") or RUNS)))
    if slurm.has_several_tasks:
        chosen.setdefault("machines", str(slurm.num_tasks))
        chosen.setdefault("rendezvous", slurm.rendezvous)
        chosen.setdefault("devices", slurm.devices(torch.cuda.device_count()))
    return chosen


def _job_name(slurm: Slurm, label: str, out: Path) -> str:
    """A new name for each training of a job; for a requeued job, the name of the run that it began."""
    stem = f"{label}-job{slurm.job}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    taken = [name for name in names if (out / name).exists()]
    if slurm.num_restarts and taken:
        return taken[-1]
    return next(name for name in names if name not in taken)


def _begun(source: Source, chosen: Mapping[str, Any], continues: bool) -> Prepared | None:
    """The run that an earlier start of this command, or of a requeued job, began in its folder; None for a new one."""
    folder = Path(chosen.get("out") or RUNS) / str(chosen.get("name", ""))
    if not continues or not os.path.isfile(folder / "plan.json"):
        return None
    _refuse_changes(read_plan(folder), chosen, folder)
    prepared = prepare_from_plan(read_plan(folder), source, chosen)
    plan = prepared.plan
    try:
        resume, notes = integrity.find(str(folder))
    except CheckpointError:
        return replace(prepared, num_steps=plan.num_steps(prepared.lengths))
    num_steps = plan.num_steps(prepared.lengths, *files.start_of(str(resume)))
    notes = [*notes, f"continuing from {resume.name} of {folder}"]
    return replace(prepared, plan=replace(plan, resume=str(resume)), num_steps=num_steps, notes=notes)


REPEATED = ("strategy", "batch", "epochs", "steps", "accumulate", "precision", "seed")
"""Choices that a run keeps when its command is repeated."""


def _refuse_changes(plan: Plan, chosen: Mapping[str, Any], folder: Path) -> None:
    """A command that is repeated with other choices would train as the first one said, and not say so."""
    given = {name: chosen[name] for name in REPEATED if chosen.get(name) is not None}
    changed = [f"--{name} {value}" for name, value in given.items() if value != getattr(plan, name)]
    if changed:
        where = shorten(str(folder))
        raise PlanError(
            f"{where} was not begun with {' '.join(changed)}, and --resume {CONTINUE} repeats its command;\n"
            f"to change it, resume into another run: evenstep train --resume {where} {' '.join(changed)}"
        )


def train(task: str | TaskFunction | Task, *, progress: bool = True, quiet: bool = False, **choices: Any) -> Record:
    """Train a task and return its Record; the choices are the fields of a Plan, and may be left out.

    record = evenstep.train(task, strategy="ddp", devices=2, batch=512, epochs=10)

    `quiet` shows messages alone, as `--quiet` does; without `progress`, nothing is shown.
    """
    if isinstance(worker_spec(), TrainingSpec):
        raise PlanError(f"{CALLED_BY_WORKER}; let the script alone call it:\n{GUARDED}")
    unknown = sorted(set(choices) - set(CHOICES))
    if unknown:
        close = difflib.get_close_matches(unknown[0], (*CHOICES, "progress", "quiet"), n=1)
        hint = f"did you mean {close[0]}?" if close else f"train takes {', '.join(CHOICES)}"
        raise PlanError(f"unknown {', '.join(unknown)}; {hint}")
    with settings_kept(), _explaining_guard():
        return watch(*prepare_run(task, choices), "nothing" if not progress else "messages" if quiet else "all")


CALLED_BY_WORKER = "evenstep.train was called by a worker that imports your script"
GUARDED = 'if __name__ == "__main__": evenstep.train(...)'


@contextmanager
def _explaining_guard() -> Iterator[None]:
    """End a script that calls `train` without a guard with three lines: its traceback would show our frames alone."""
    try:
        yield
    except BadInput as error:
        script = getattr(sys.modules["__main__"], "__file__", None)
        found = re.search(rf"{CALLED_BY_WORKER}.*\((.+):(\d+)\)$", str(error), re.DOTALL)
        if not script or not found or os.path.realpath(script) != os.path.realpath(found[1]):
            raise
        sys.exit(
            f"error: {found[1]}:{found[2]} calls evenstep.train, and each worker calls it again when it imports this "
            f"file to find the task.\nWrite it so that the script alone calls it:\n{GUARDED}"
        )


Shows = Literal["all", "messages", "nothing"]
ELSEWHERE = "the checkpoints are on the first machine"


def watch(prepared: Prepared, rendezvous: Rendezvous, shows: Shows = "all", is_command: bool = False) -> Record:
    """Carry the plan out, show its progress, and read its Record.

    A command may exit when it hangs; a notebook's process must survive.
    """
    if is_command:
        put_off_compiler()
    is_head = rendezvous.is_head
    is_silent = shows == "nothing"
    progress = Progress(prepared.num_steps, quiet=is_silent, is_bare=not is_head, shows_steps=shows == "all")
    with progress as shown, _feeding_trackers(prepared, shown) if is_head else nullcontext():
        try:
            events = _run(prepared, rendezvous, is_command)
            if is_head and launcher_variables().KUBEFLOW_TRAINER_SERVER_URL:
                from evenstep.launcher.kubeflow_progress import with_progress

                events = with_progress(events, prepared.num_steps)
            if prepared.plan.profile is not None and is_head:
                events = with_trace(events, prepared.folder)
            with explain_worker_death():
                for event in events:
                    shown.show(event)
        except (KeyboardInterrupt, Preempted) as stop:
            slurm = find_slurm() if isinstance(stop, Preempted) else None
            if slurm is not None and prepared.plan.requeue and is_head:
                shown.log(slurm.requeue())
            if is_head:
                write_end(prepared.folder, RunEnd(state="stopped", why=_signal_of(stop)))
            raise type(stop)(stopped_where(prepared.folder) if is_head else f"stopped; {ELSEWHERE}") from None
        except EvenstepError as error:
            if is_head:
                write_end(prepared.folder, RunEnd(state="failed", why=str(error).partition("\n")[0]))
            raise
    # The Record is where rank 0 was, which may be on another machine.
    if not is_head:
        return Record(prepared.plan)
    return Record.read(prepared.folder, kinds=("summary",) if is_command else KINDS)


def _feeding_trackers(prepared: Prepared, shown: Progress) -> AbstractContextManager[None]:
    if prepared.plan.log is None:
        return nullcontext()
    from evenstep.trackers.tracker_process import following

    return following(parse_log(prepared.plan.log), prepared.folder, shown.log)


def _signal_of(stop: BaseException) -> str:
    return "a stop signal" if isinstance(stop, Preempted) else "Ctrl-C"


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore torch's global settings and generators after a training in this process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    warns, is_filled = torch.is_deterministic_algorithms_warn_only_enabled(), memory.fill_uninitialized_memory
    cublas = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    flags = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    tf32 = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    generator, host = torch.get_rng_state(), host_state()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        memory.fill_uninitialized_memory = is_filled
        if cublas is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
        torch.set_rng_state(generator)
        restore_host_state(host)


CHOICES = (*(field.name for field in fields(Plan) if field.name != "task"), "plan")


def _run(prepared: Prepared, rendezvous: Rendezvous, ends_stalls: bool) -> Iterator[Event]:
    """Carry the plan out, yielding events as they happen."""
    if not STRATEGIES[prepared.plan.strategy].processes_per_device and not prepared.plan.restarts:
        rendezvous.close()
        return _in_this_process(prepared, ends_stalls)
    return Supervisor(_launch_of(prepared, perform), rendezvous).events()


def _in_this_process(prepared: Prepared, ends_stalls: bool) -> Iterator[Event]:
    logs = prepared.folder / "logs"
    try:
        folder = prepared.folder.absolute()
        stalls = exit_on_stall(folder / "logs", prepared.plan.stall_after) if ends_stalls else nullcontext()
        with stalls, chdir(prepared.cwd):
            yield from perform(prepared.plan, prepared.task, folder, signal.SIGINT)
    except EvenstepError as error:
        if isinstance(error, TrainingError):
            # `evenstep runs` reads it.
            write_report(logs, 0, error)
        raise
    except (Exception, SystemExit) as error:
        write_report(logs, 0, error)
        raise report([cause(logs, {0: 1}, {})], prepared.folder) from error


def _threads(plan: Plan) -> int:
    """Of each process."""
    fixed = threads_for_replicas() if plan.virtual_replicas is not None else None
    return share_threads(plan.threads or fixed, plan.devices)


def refuse_fork_after_cuda() -> None:
    """A forked process cannot use CUDA if its parent has initialized it."""
    if torch.cuda.is_initialized():
        raise PlanError(
            f"this process has already initialized CUDA, so it cannot be forked for {with_processes()}.\n"
            "Put the task in a file and pass 'file.py', or restart the notebook and train before using the GPU"
        )


def variant(base: Prepared, folder: Path, *, steps: int, **changes: Any) -> Prepared:
    """The same task for this many steps, with some fields of its plan changed."""
    plan = replace(base.plan, name=folder.name, out=str(folder.parent), steps=steps, epochs=None, **changes)
    write_plan(folder, plan)
    return replace(base, plan=plan, folder=folder, num_steps=plan.num_steps(base.lengths))


def run_in_processes(prepared: Prepared, perform: Perform = perform) -> Iterator[Event]:
    """Run a part of a command in separate processes, single and dp too, so that its memory can be measured.

    They may `perform` something else than a training: a function of a module, which they import. A stop signal ends
    them at once: nobody would resume them.
    """
    return Supervisor(replace(_launch_of(prepared, perform), saves=False), LocalRendezvous()).events()


def _launch_of(prepared: Prepared, perform: Perform) -> Launch:
    if prepared.is_importable:
        return _launch(prepared.plan, prepared.folder, (perform,))
    refuse_fork_after_cuda()
    return _launch(prepared.plan, prepared.folder, (perform, prepared.task), prepared.cwd)


def run_one_of_several(
    plan: Plan, folder: Path, stop: StopSignals, perform: Perform = perform
) -> Generator[Event, None, None]:
    """Run a plan that was prepared before, in its folder, beside others: it yields WAITING while nothing happens.

    Whoever watches them handles signals, by `stop`.
    """
    launch = replace(_launch(plan, folder, (perform,)), is_one_of_several=True)
    return Supervisor(launch, LocalRendezvous(), stop).events()


def _launch(plan: Plan, folder: Path, more: tuple[Any, ...], cwd: str | None = None) -> Launch:
    """`more` is what ranks perform, and a task that they inherit; such a one has also chosen its working folder."""
    spec = TrainingSpec(
        plan=plan,
        # Absolute: the user's code may change the working folder.
        run_folder=str(folder.absolute()),
        cwd=cwd,
        strategies=added_strategies(),
        environment={"OMP_NUM_THREADS": str(_threads(plan))},
    )
    return Launch(
        folder,
        len(plan.devices) if STRATEGIES[plan.strategy].processes_per_device else 1,
        work,
        spec,
        more,
        "server" if cwd is None else "fork",
        plan.restarts,
        plan.stall_after,
        # A compiler may be called again in any step: for the short last batch, for evaluation.
        FIRST_SECONDS if plan.compile else LEAST_SECONDS,
    )
