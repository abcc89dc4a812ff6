"""`--profile STEPS`: torch's profiler on every rank, for some steps in the middle of a training.

Each rank writes `traces/rank0.json.gz` and so on; those of other machines are sent to rank 0's folder. Whatever goes
wrong here is said, and the training goes on: every rank takes part in every message, whether its profiler works or not.

What evenstep is doing, marked in the profiler's trace: steps, their parts, and what our own code sends.

Nothing of this is in the way of a training that is not traced: the heartbeat is listened to, and a model's methods are
replaced by ones that mark, for the steps that are.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from evenstep.distributed.heartbeat import INPUT, PARTS, PHASES, SAVING, Heartbeat
from evenstep.plan import Plan
from evenstep.strategies.base import DistributedModel
from evenstep.training.team import Team

T = TypeVar("T")
MARK = "evenstep: "
TOGETHER = f"{MARK}together"


class Marks:
    """The spans that are open: one for the step, and one for each thread that has a part in it."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._step: record_function | None = None
        self._open: dict[int, tuple[str, record_function]] = {}

    @property
    def is_in_step(self) -> bool:
        return self._step is not None

    def phase(self, phase: int) -> None:
        """The pulse's listener."""
        if phase == INPUT and self._step is None:
            self.end()
            self._step = _opened(f"step {self._heartbeat.step}")
        name = PARTS.get(phase)
        if name is None:
            self.begin(PHASES[phase])
        elif self.is_in_step:
            self.begin(name)
        else:
            # After a pause, the pulse says again what went on before it; that step is over.
            self.end()

    def begin(self, name: str) -> None:
        """This thread does something else from here on."""
        thread = threading.get_ident()
        if thread in self._open and self._open[thread][0] == name:
            return
        self.end()
        self._open[thread] = (name, _opened(name))

    def end(self) -> None:
        """This thread does nothing that has a name."""
        _, span = self._open.pop(threading.get_ident(), ("", None))
        if span is not None:
            span.__exit__(None, None, None)

    def end_step(self) -> None:
        """The step is taken."""
        self.end()
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None


def _opened(name: str) -> record_function:
    span = record_function(f"{MARK}{name}")
    span.__enter__()
    return span


@contextmanager
def marked(team: Team, marks: Marks) -> Iterator[None]:
    """Inside, every step of this process is marked."""
    heartbeat = team.world.heartbeat
    sends = not team.facts.processes_per_device and len(team.world.devices) > 1
    for model in team.models:
        marking = Marked(model, marks, sends)
        vars(model).update({name: getattr(marking, name) for name in REPLACED})
    heartbeat.also(marks.phase)
    try:
        yield
    finally:
        heartbeat.also(None)
        for model in team.models:
            for name in REPLACED:
                vars(model).pop(name, None)


REPLACED = ("run", "sync_replicas", "sync_gradients")


class Marked:
    """Methods of a model, with marks where a part of the step begins that the heartbeat does not report."""

    def __init__(self, model: DistributedModel, marks: Marks, sends: bool) -> None:
        self._run, self._sync_replicas, self._sync_gradients = model.run, model.sync_replicas, model.sync_gradients
        self._marks = marks
        self._sends = sends
        """Whether our own code sends, and not a wrapper of torch's, which is in the trace already."""

    def sync_replicas(self, is_training: bool) -> None:
        if is_training:
            # The batch is there.
            self._marks.begin("forward")
        with self._sending("replicate"):
            self._sync_replicas(is_training)

    def run(self, work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        if not self._marks.is_in_step:
            return self._run(work, arguments)

        def until_done(*replica_arguments: Any) -> T:
            try:
                return work(*replica_arguments)
            finally:
                if threading.get_ident() != caller:
                    self._marks.end()

        caller = threading.get_ident()
        results = self._run(until_done, arguments)
        self._marks.begin("backward")
        return results

    @contextmanager
    def sync_gradients(self, is_last: bool) -> Iterator[None]:
        with ExitStack() as inside:
            inside.enter_context(self._sync_gradients(is_last))
            yield
            with self._sending("reduce") if is_last else ExitStack():
                inside.close()

    def _sending(self, name: str) -> AbstractContextManager[Any]:
        return record_function(f"{MARK}{name}") if self._sends else ExitStack()


FOLDER = "traces"
ALL = "ranks.json"
"""Written last, when what every rank has to give is there."""
WARM_UP_STEPS = 3
"""Not traced: memory is allocated, DDP orders its buckets anew, cuDNN chooses algorithms."""


def choose_steps(profile_steps: int, step: int, num_steps: int | None) -> range:
    """The steps to trace of a run that has taken `step` of its steps: after a warm-up, as long as there are enough.

    >>> choose_steps(10, 0, None), choose_steps(10, 100, 112), choose_steps(10, 0, 5), choose_steps(10, 0, 1)
    (range(4, 14), range(103, 113), range(2, 6), range(1, 2))
    """
    left = num_steps - step if num_steps is not None else WARM_UP_STEPS + profile_steps
    warm_up = max(min(WARM_UP_STEPS, left - profile_steps), min(1, left - 1), 0)
    return range(step + warm_up + 1, step + min(left, warm_up + profile_steps) + 1)


class Tracing:
    """This rank's profiler, from its start to its file."""

    def __init__(self, plan: Plan, team: Team, run_folder: Path, step: int, num_steps: int | None) -> None:
        self._team = team
        self._world = team.world
        self._folder = run_folder / FOLDER
        assert plan.profile is not None
        self._steps = choose_steps(plan.profile, step, num_steps)
        self._last = step
        # After a restart, what was traced before stays.
        if team.world.gather((self._folder / ALL).exists())[0]:
            self._steps = range(0)
        self._marks = Marks(team.world.heartbeat)
        self._profiler: Any = None
        self._is_on = False
        self._problem: str | None = None
        self._stack = ExitStack()

    def before(self, step: int) -> None:
        """All ranks call this before a step is begun."""
        if step == self._steps.start and self._steps:
            with self._world.heartbeat.during(SAVING):
                self._start()

    def after(self, step: int) -> Iterator[str]:
        """All ranks call this after each step, before they do anything else; what there is to say."""
        self._last = step
        if self._is_on:
            self._marks.end_step()
            if step + 1 == self._steps.stop:
                yield from self.finish()
        self.before(step + 1)

    def finish(self) -> Iterator[str]:
        """After the last step that is traced, or the last there was."""
        if not self._is_on:
            return
        with self._world.heartbeat.during(SAVING):
            self._is_on = False
            self._stack.close()
            self._try(self._stop)
            yield from self._hand_in()

    def abandon(self) -> None:
        """The training ends in the middle of it."""
        self._is_on = False
        self._marks.end_step()
        self._stack.close()
        if self._profiler is not None:
            with suppress(Exception):
                self._profiler.stop_trace()
        self._profiler = None

    def _try(self, what: Any) -> None:
        """Do it; a problem is kept, to be said when all ranks hand in what they have."""
        try:
            if self._problem is None:
                what()
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"

    def _start(self) -> None:
        self._try(self._begin_profiling)
        self._is_on = True
        self._world.barrier()
        with record_function(TOGETHER):
            pass
        self._stack.enter_context(marked(self._team, self._marks))

    def _begin_profiling(self) -> None:
        self._folder.mkdir(exist_ok=True)
        # Or it says on stderr when it starts and stops; read when it is first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # All threads: dp has one for each seat, and gloo's have what travels.
        self._profiler = profile(
            activities=activities,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        with warnings.catch_warnings():
            # torch 2.11 warns of what would come of a second start.
            warnings.simplefilter("ignore")
            self._profiler.prepare_trace()
        self._profiler.start_trace()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop_trace()
        profiler.export_chrome_trace(str(self._path(self._world.rank)))

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.json.gz"

    def _hand_in(self) -> Iterator[str]:
        """Bring what the ranks wrote together in rank 0's folder."""
        size = self._path(self._world.rank).stat().st_size if self._problem is None else None
        told = self._world.gather([self._problem, size, machine_name()])
        mine = [_size(self._path(rank)) for rank in range(self._world.size)]
        here = self._world.gather(mine)[0]
        for rank, (_, size, _) in enumerate(told):
            if size is not None and here[rank] != size:
                self._send(rank, size)
        without = {rank: problem for rank, (problem, _, _) in enumerate(told) if problem}
        if without:
            ranks = f"rank{'s' * (len(without) > 1)} {', '.join(map(str, without))}"
            yield f"warning: no trace of {ranks} ({next(iter(without.values()))}); the training goes on"
        if self._world.is_main and len(without) < len(told):
            yield from self._close_folder(told)

    def _send(self, rank: int, size: int) -> None:
        """One rank's file to rank 0, from a machine whose files rank 0 does not see."""
        if self._world.rank == rank:
            content = bytearray(self._path(rank).read_bytes())
            dist.send(torch.frombuffer(content, dtype=torch.uint8), 0)
        elif self._world.is_main:
            arrived = torch.empty(size, dtype=torch.uint8)
            dist.recv(arrived, rank)
            self._try(lambda: self._path(rank).write_bytes(arrived.numpy().tobytes()))

    def _close_folder(self, told: list[Any]) -> Iterator[str]:
        ranks = {
            rank: {"file": self._path(rank).name, "machine": machine}
            for rank, (problem, _, machine) in enumerate(told)
            if problem is None
        }
        steps = [self._steps.start, self._last]
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / ALL).write_text(json.dumps({"steps": steps, "ranks": ranks}) + "\n")
        except OSError as error:
            yield f"warning: the traces cannot be written ({error}); the training goes on"


def machine_name() -> str:
    """What machines are told apart by: processes with the same one share a clock."""
    with suppress(OSError):
        return f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return platform.node()


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def start_tracing(plan: Plan, team: Team, run_folder: Path, step: int, num_steps: int | None) -> Tracing | None:
    """As the plan says, before the first step; None if it says nothing."""
    if plan.profile is None:
        return None
    tracing = Tracing(plan, team, run_folder, step, num_steps)
    tracing.before(step + 1)
    return tracing
