"""`--profile STEPS`: torch's profiler on every rank, for some steps in the middle of a training.

Each rank writes `traces/rank0.json.gz` and so on; those of other machines are sent to rank 0's folder. A profiler that
fails is a warning, and the training continues: every rank takes part in every message, whether its profiler works or
not.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from evenstep.distributed.heartbeat import PHASES, SAVING, Heartbeat
from evenstep.distributed.step_spans import Listener
from evenstep.distributed.world import World
from evenstep.private_apis import profile_all_threads
from evenstep.profiling.step_parts import COMMUNICATION, Timer, usual_parts
from evenstep.record import SPAN_PREFIX, TRACE_INDEX, TRACES


class NamedSpans(Listener):
    """Names steps and their parts in the profiler's trace: one span for the step, and one in each of its threads."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._step: record_function | None = None
        self._open: dict[int, tuple[str, record_function]] = {}

    def part(self, name: str) -> None:
        if name == COMMUNICATION:
            # Of a wrapper of torch's, whose collectives are in the trace already.
            return
        if name == "input" and self._step is None:
            self.leave()
            self._step = _opened(f"step {self._heartbeat.step}")
        thread = threading.get_ident()
        if thread in self._open and self._open[thread][0] == name:
            return
        self.leave()
        # After a pause, the phase before it is announced again; its step is over.
        if self._step is not None or name in PHASES:
            self._open[thread] = (name, _opened(name))

    def leave(self) -> None:
        _, span = self._open.pop(threading.get_ident(), ("", None))
        if span is not None:
            span.__exit__(None, None, None)

    def end_step(self) -> None:
        """The step is taken."""
        self.leave()
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None


def _opened(name: str) -> record_function:
    span = record_function(f"{SPAN_PREFIX}{name}")
    span.__enter__()
    return span


WARM_UP_STEPS = 3
"""Not traced: memory is allocated, DDP rebuilds its buckets, cuDNN chooses algorithms."""


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

    def __init__(self, num: int, world: World, run_folder: Path, step: int, num_steps: int | None) -> None:
        """Of `num` steps, in a run that has taken `step` of its `num_steps`; all ranks call this before the next."""
        self._world = world
        self._folder = run_folder / TRACES
        self._steps = choose_steps(num, step, num_steps)
        self._last = step
        # After a restart, what was traced before stays.
        if world.gather((self._folder / TRACE_INDEX).exists())[0]:
            self._steps = range(0)
        self._spans = NamedSpans(world.heartbeat)
        self._timer: Timer | None = None
        self._profiler: Any = None
        self._is_on = False
        self._problem: str | None = None
        self._stack = ExitStack()
        self.before(step + 1)

    def waits_at(self, step: int) -> bool:
        """Whether this step must be over before the next one is begun."""
        return bool(self._steps) and self._steps.start - 1 <= step < self._steps.stop

    def before(self, step: int) -> None:
        """All ranks call this before a step is begun."""
        if step == self._steps.start and self._steps:
            with self._world.spans.during(SAVING):
                self._start()

    def after(self, step: int) -> Iterator[str]:
        """All ranks call this after each step, before they do anything else; yields lines to log."""
        self._last = step
        if self._is_on:
            self._spans.end_step()
            if self._timer is not None:
                self._timer.stop()
            if step + 1 == self._steps.stop:
                yield from self.finish()
        self.before(step + 1)

    def finish(self) -> Iterator[str]:
        """After the last step that is traced, or the last there was."""
        if not self._is_on:
            return
        self._is_on = False
        self._stack.close()
        with self._world.spans.during(SAVING):
            self._try(self._stop)
            yield from self._hand_in()

    def abandon(self) -> None:
        """The training ends in the middle of it."""
        self._is_on = False
        self._spans.end_step()
        self._stack.close()
        if self._profiler is not None:
            with suppress(Exception):
                self._profiler.stop_trace()
        self._profiler = None

    def _try(self, what: Any) -> None:
        """Do it; a problem is kept until all ranks hand in what they have."""
        try:
            if self._problem is None:
                what()
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"

    def _start(self) -> None:
        self._try(self._begin_profiling)
        self._is_on = True
        self._world.barrier()
        with record_function(f"{SPAN_PREFIX}together"):
            pass
        self._timer = Timer(self._world.devices)
        for listener in (self._timer, self._spans):
            self._stack.enter_context(self._world.spans.listening(listener))

    def _begin_profiling(self) -> None:
        self._folder.mkdir(exist_ok=True)
        # Otherwise it logs its start and stop on stderr; read when it is first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # All threads: dp has one for each replica, and gloo sends in its own.
        self._profiler = profile(
            activities=activities,
            experimental_config=profile_all_threads(),
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
        written = self._world.gather([self._problem, size, machine_name(), self._numbers()])
        mine = [_size(self._path(rank)) for rank in range(self._world.size)]
        here = self._world.gather(mine)[0]
        for rank, (_, size, _, _) in enumerate(written):
            if size is not None and here[rank] != size:
                self._send(rank, size)
        without = {rank: problem for rank, (problem, *_) in enumerate(written) if problem}
        if without:
            ranks = f"rank{'s' * (len(without) > 1)} {', '.join(map(str, without))}"
            yield f"warning: no trace of {ranks} ({next(iter(without.values()))}); training continues"
        if self._world.is_main and len(without) < len(written):
            yield from self._close_folder(written)

    def _numbers(self) -> dict[str, Any]:
        """How many steps were timed, and the parts of a typical one."""
        assert self._timer is not None
        found = self._timer.read()
        parts: dict[str, float | None] = {**usual_parts([found])}
        if self._world.size > 1 and not parts[COMMUNICATION]:
            # Under fsdp the GPU itself waits for collectives, and the host does not know when.
            parts[COMMUNICATION] = None
        return {"steps": len(found.steps), "parts": parts}

    def _send(self, rank: int, size: int) -> None:
        """One rank's file to rank 0, from a machine whose files rank 0 does not see."""
        if self._world.rank == rank:
            content = bytearray(self._path(rank).read_bytes())
            dist.send(torch.frombuffer(content, dtype=torch.uint8), 0)
        elif self._world.is_main:
            arrived = torch.empty(size, dtype=torch.uint8)
            dist.recv(arrived, rank)
            self._try(lambda: self._path(rank).write_bytes(arrived.numpy().tobytes()))

    def _close_folder(self, written: list[Any]) -> Iterator[str]:
        ranks = {
            rank: {"file": self._path(rank).name, "machine": machine, **numbers}
            for rank, (problem, _, machine, numbers) in enumerate(written)
            if problem is None
        }
        steps = [self._steps.start, self._last]
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / TRACE_INDEX).write_text(json.dumps({"steps": steps, "ranks": ranks}) + "\n")
        except OSError as error:
            yield f"warning: the traces cannot be written ({error}); training continues"


def machine_name() -> str:
    """Identifies a machine: processes with the same one share a clock."""
    with suppress(OSError):
        return f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return platform.node()


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None
