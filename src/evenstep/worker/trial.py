"""Some steps of a training and nothing else: no evaluation, no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evenstep.errors import Preempted
from evenstep.plan import Plan
from evenstep.task import Task
from evenstep.worker.job import Event, Job
from evenstep.worker.perform import perform
from evenstep.worker.train import train


def trial(plan: Plan, task: Task, run_folder: Path) -> Iterator[Event]:
    """What a worker does to see how fast a plan is: the plan's steps, as a training takes them."""
    return perform(plan, task, run_folder, make=Trial)


class Trial(Job):
    """The steps alone."""

    def events(self) -> Iterator[Event]:
        """Each step; a wish to stop ends it, with nothing to save."""
        for step, _ in train(self.run, self.stepper, self.plan, self._peak_bytes, waits_at=self._waits_at):
            yield from self._said()
            yield step
            if self.team.requests.stop:
                raise Preempted("asked to stop")
