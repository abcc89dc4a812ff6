"""One block of a comparison: warm-up, steps as they are, without input, with their parts, and without communication.

`trial` runs the steps alone: no evaluation, no checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import fmean, median

import torch

from evenstep.data.loader import Batch, Loader
from evenstep.errors import Preempted
from evenstep.plan import Plan
from evenstep.profiling.step_parts import RankSpans, Timer, timeline, usual_parts
from evenstep.record import Measurement, Step
from evenstep.task import Task, has_several
from evenstep.training.loop import StepTaken, train
from evenstep.training.step import Stepper, eager_steps
from evenstep.training.team import Team
from evenstep.training.trainer import Event, Trainer, perform

SHOWN_STEPS = 3
"""Timed steps of which the whole timeline is kept."""
SETTLING_STEPS = 2
"""Untimed steps after a change, such as a new DDP hook."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """How many steps of each kind."""

    warm_up: int
    steps: int
    special: int
    """Number of steps without input, with timed parts, and without communication, each."""

    @property
    def plan_steps(self) -> int:
        """All that a scheduler will count; those without input use up no data."""
        return self.warm_up + self.steps + 3 * self.special + 2 * SETTLING_STEPS


def measure(plan: Plan, task: Task, run_folder: Path, *, block: Block) -> Iterator[Event]:
    """What a worker of a comparison does instead of training: `plan.steps` is the block's `plan_steps`."""
    return perform(plan, task, run_folder, make=partial(Measuring, block))


class Measuring(Trainer):
    """A training whose steps are timed."""

    def __init__(self, block: Block, plan: Plan, task: Task, run_folder: Path, team: Team) -> None:
        super().__init__(plan, task, run_folder, team)
        self.block = block
        self._batches = KeepsWhole(self.run.loader)
        self._steps = train(self.run, self.stepper, plan, self._peak_bytes, self._batches)

    def _stepper(self) -> Stepper:
        # Only eager steps can be timed in parts, and the parts must belong to the steps that are measured.
        return super()._stepper() if has_several(self.task) else eager_steps(self._recipe())

    def events(self) -> Iterator[Event]:
        """Steps of the training itself, and what was measured."""
        first_step_at = 0.0
        for _ in range(self.block.warm_up):
            step = self._next()
            first_step_at = first_step_at or time.time()
            yield step
        taken: list[Step] = []
        seconds: list[float] = []
        self._together()
        began = time.perf_counter()
        for _ in range(self.block.steps):
            before = time.perf_counter()
            step = self._next()
            seconds.append(time.perf_counter() - before)
            taken.append(step)
            # What becomes of a step is a part of every training.
            yield step
        self._wait_for_devices(seconds)
        whole_seconds = time.perf_counter() - began
        peaks = {name: size for of_rank in self.team.world.gather(self._peak_bytes()) for name, size in of_rank.items()}
        without_input = self._without_input()
        ranks, sent_bytes = self._timed()
        first = self.run.step - len(ranks[0].steps)
        parts = usual_parts(ranks)
        without_communication = self._without_communication(sent_bytes)
        shown = range(len(ranks[0].steps))[-SHOWN_STEPS:]
        yield from (timeline(ranks, index, first + index + 1) for index in shown)
        yield Measurement(
            first_step_at=first_step_at,
            samples=sum(step.samples for step in taken),
            seconds=whole_seconds,
            step_seconds=seconds,
            timed_seconds=sum(parts.values()),
            parts=self._with_hidden(parts, without_communication),
            without_input_seconds=without_input,
            without_communication_seconds=without_communication,
            sent_bytes=sent_bytes,
            peak_bytes=peaks,
        )

    def _next(self, steps: Iterator[StepTaken] | None = None) -> Step:
        taken = next(steps or self._steps)
        while taken.is_rest:
            taken = next(steps or self._steps)
        step = taken.step
        if self.team.requests.stop:
            raise Preempted("stopped")
        return step

    def _together(self) -> None:
        """Wait for the devices, which the host runs ahead of, and for the other ranks."""
        self._wait_for_devices()
        self.team.world.barrier()

    def _wait_for_devices(self, seconds: list[float] | None = None) -> None:
        """The host may be ahead of the devices; that time counts to its last step."""
        began = time.perf_counter()
        for device in self.team.world.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if seconds:
            seconds[-1] += time.perf_counter() - began

    def _without_input(self) -> float:
        """Seconds of a step on a batch that is there already."""
        batches = repeat(self._batches.whole)
        return self._usual(train(self.run, self.stepper, self.plan, self._peak_bytes, batches))

    def _timed(self) -> tuple[list[RankSpans], int]:
        """Every rank's spans of some steps, and the bytes that each sent in one of them."""
        world = self.team.world
        self._model.time_communication()
        for _ in range(SETTLING_STEPS):
            self._next()
        self._together()
        timer = Timer(world.devices)
        with world.spans.listening(timer):
            for _ in range(self.block.special):
                self._next()
            timer.stop()
        self._together()
        ranks = [RankSpans(**values) for values in world.gather(asdict(timer.read()))]
        return ranks, round(timer.sent_bytes / self.block.special)

    def _without_communication(self, sent_bytes: int) -> float | None:
        """Seconds of a step after which nothing is sent; None where nothing ever is, or no step can do without."""
        communication = self.team.world.communication
        if not sent_bytes or self._model.needs_communication:
            return None
        communication.is_off = True
        try:
            for _ in range(SETTLING_STEPS):
                self._next()
            return self._usual(self._steps)
        finally:
            communication.is_off = False

    def _usual(self, steps: Iterator[StepTaken]) -> float:
        """Seconds of a usual step, the mean of all ranks."""
        seconds = []
        self._together()
        for _ in range(self.block.special):
            began = time.perf_counter()
            self._next(steps)
            seconds.append(time.perf_counter() - began)
        self._wait_for_devices(seconds)
        return fmean(self.team.world.gather(usual(seconds, self.team.world.device.type)))

    def _with_hidden(self, parts: dict[str, float], without_communication: float | None) -> dict[str, float]:
        """On a GPU, fsdp's collectives are waited for by the GPU itself: their cost is what a step saves without them,
        taken from forward and backward."""
        if without_communication is None or parts["communication"] or self.team.world.device.type != "cuda":
            return parts
        computing = parts["forward"] + parts["backward"]
        exposed = min(computing, max(0.0, sum(parts.values()) - without_communication))
        left = 1 - exposed / (computing or 1.0)
        return {
            **parts,
            "forward": parts["forward"] * left,
            "backward": parts["backward"] * left,
            "communication": exposed,
        }


class KeepsWhole:
    """The batches of a loader, of which the last whole one is kept: that of an epoch's end may be smaller."""

    whole: Batch

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            if not hasattr(self, "whole") or batch.num_samples >= self.whole.num_samples:
                self.whole = batch
            yield batch


def usual(seconds: Sequence[float], kind: str) -> float:
    """Seconds of a typical step: on a GPU the mean, since the host runs ahead of single steps; else the median."""
    return fmean(seconds) if kind == "cuda" else median(seconds)


def trial(plan: Plan, task: Task, run_folder: Path) -> Iterator[Event]:
    """What a worker does to see how fast a plan is: the plan's steps, as a training takes them."""
    return perform(plan, task, run_folder, make=TrialRun)


class TrialRun(Trainer):
    """The steps alone."""

    def events(self) -> Iterator[Event]:
        """Each step; a stop request ends it, with nothing to save."""
        for step, *_ in train(self.run, self.stepper, self.plan, self._peak_bytes, waits_at=self._waits_at):
            yield from self._messages()
            yield step
            if self.team.requests.stop:
                raise Preempted("stopped")
