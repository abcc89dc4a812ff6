"""The Record of a custom loop: rank 0 writes a row for each step and evaluation, and starts what feeds trackers."""

from __future__ import annotations

import atexit
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep.checkpoint import files
from evenstep.distributed import devices
from evenstep.distributed.worker_process import read_local_size
from evenstep.early_stopping import BestSoFar
from evenstep.errors import TaskError
from evenstep.plan import CUSTOM_LOOP, Plan, check_name, parse_log
from evenstep.record import Evaluation, RecordWriter, Row, Step, Summary, Tally, has_begun
from evenstep.training.evaluation import Means
from evenstep.training.loop import PEAKS_EVERY

if TYPE_CHECKING:
    from evenstep.data.loader import Loader
    from evenstep.trackers.tracker_process import Followers
    from evenstep.training.team import Team


@dataclass(frozen=True)
class LoopStep:
    """What a custom loop knows of a step that it has taken."""

    step: int
    epoch: int
    loss: float
    samples: int
    count: float
    lr: float
    input_seconds: float
    """Waited for batches since the run began."""
    epoch_samples: int
    logged: dict[str, float]
    grad_norm: float | None


@dataclass(frozen=True)
class LoopChoices:
    """What a custom loop chose for its run."""

    log: str | None
    """As in `--log mlflow`."""
    best: str | None
    """As in `--best accuracy:max`."""


class LoopRecord:
    """Rows of a custom loop; on ranks other than 0 nothing is written."""

    def __init__(self, team: Team, folder: Path, plan: Plan, facts: dict[str, Any]) -> None:
        self.tally = Tally()
        self.evaluation: Evaluation | None = None
        """The last one."""
        self.best = BestSoFar.of(plan) if plan.best is not None else None
        self.continues = False
        """Whether the loop resumes the run of this folder."""
        self._world = team.world
        self._folder = folder
        self._plan = plan
        self._facts = facts
        """Where the loop starts in its data."""
        self._writer: RecordWriter | None = None
        self._followers: Followers | None = None
        self._peaks: dict[str, int] = {}
        self._waited = 0.0
        self._last_step = 0
        self._began = self._row_began = time.perf_counter()

    def _open(self) -> None:
        """Begin to write, or go on; the first row does."""
        if self._writer is not None or not self._world.is_main:
            return
        is_again = has_begun(self._folder)
        if is_again and not self.continues:
            raise TaskError(
                f"{self._folder} holds an earlier run; call run.load() before the loop to continue it, or give "
                "another folder"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._plan.log is not None:
            from evenstep.trackers.tracker_process import Followers

            self._followers = Followers(parse_log(self._plan.log), self._folder)
            # Called after the one below: first the Record has its last rows.
            atexit.register(self._end_tracking)
        self._writer = RecordWriter(self._folder, self._plan, devices.facts(self._world), self._facts)
        # A process of `evenstep run` ends without closing files.
        atexit.register(self._writer.close)

    def add_step(self, taken: LoopStep) -> None:
        """Write the row of a step."""
        self._open()
        if taken.step == self._last_step:
            raise TaskError(
                f"step {taken.step} was logged before; call run.log once for each step, with all its values"
            )
        self._last_step = taken.step
        now = time.perf_counter()
        seconds = now - self._row_began
        if taken.step < PEAKS_EVERY or taken.step % PEAKS_EVERY == 0:
            self._peaks |= devices.peak_bytes(self._world)
        row = Step(
            step=taken.step,
            epoch=taken.epoch,
            loss=taken.loss,
            samples=taken.samples,
            count=taken.count,
            seconds=seconds,
            input_seconds=min(seconds, taken.input_seconds - self._waited),
            lr=taken.lr,
            peak_bytes=dict(self._peaks),
            epoch_samples=taken.epoch_samples,
            logged=taken.logged,
            grad_norm=taken.grad_norm,
        )
        self._waited = taken.input_seconds
        self.tally.add(row)
        self._append(row)
        self.pause_ended()

    def add_evaluation(self, step: int, epoch: int, means: Means, seconds: float) -> None:
        """Write the row of an evaluation."""
        row = Evaluation(step=step, epoch=epoch, values=dict(means), samples=means.num_samples, seconds=seconds)
        self.evaluation = row
        if self.best is not None:
            self.best.add(row, str(self._checkpoint(files.step_name(step))))
        self._append(row)
        self.pause_ended()

    def is_best_at(self, step: int) -> bool:
        """Whether the evaluation of this step is the best so far."""
        return self.best is not None and self.best.best is not None and self.best.best.step == step

    def pause_ended(self) -> None:
        """What was done since the last row (an evaluation, a checkpoint) is no part of the next step."""
        self._row_began = time.perf_counter()

    def so_far(self) -> files.Totals:
        """What a resumed loop must know of the rows before it."""
        value = self.best.best.value if self.best is not None and self.best.best is not None else None
        return files.Totals(tally=self.tally, best=value, evaluation=self.evaluation, best_so_far=self.best)

    def recall(self, facts: dict[str, Any], so_far: files.Totals | None) -> None:
        """Go on from here in the data, and from what `so_far` returned in the run that is resumed."""
        self.continues, self._facts = True, facts
        if so_far is not None:
            self.tally, self.evaluation = so_far.tally, so_far.evaluation
            self._began -= self.tally.seconds
            before = so_far.best_so_far
            if self.best is not None and before is not None and before.by == self.best.by:
                self.best = before

    def flush(self) -> None:
        """Before a checkpoint, its rows are on the disk."""
        if self._writer is not None:
            self._writer.flush()

    def finish(self, checkpoint: Path | None) -> Summary:
        """Write the summary; all ranks call this."""
        peaks = self._world.gather({**self._peaks, **devices.peak_bytes(self._world)})
        summary = Summary(
            strategy=self._plan.strategy,
            devices=list(self._plan.devices),
            steps=self.tally.steps,
            samples=self.tally.samples,
            train_loss=self.tally.train_loss,
            valid=self.evaluation.values if self.evaluation is not None else {},
            samples_per_second=self.tally.samples_per_second,
            seconds=time.perf_counter() - self._began,
            peak_bytes={name: size for of_rank in peaks for name, size in of_rank.items()},
            checkpoint=str(self._checkpoint(checkpoint.name)) if checkpoint is not None else None,
            run=str(self._run),
            best=self.best.best if self.best is not None else None,
        )
        self._append(summary)
        self.flush()
        if self._followers is not None:
            self._followers.end()
        return summary

    @property
    def _run(self) -> Path:
        """runs/mine, as everybody calls it, wherever it lies."""
        return Path(*self._folder.absolute().parts[-2:])

    def _checkpoint(self, name: str) -> Path:
        return self._run / files.FOLDER / name

    def _append(self, row: Row) -> None:
        self._open()
        if self._writer is None:
            return
        self._writer.append(row)

    def _end_tracking(self) -> None:
        for line in self._followers.wait() if self._followers is not None else ():
            print(line, file=sys.stderr)


def loop_plan(team: Team, loader: Loader, folder: Path, choices: LoopChoices) -> Plan:
    """What a custom loop runs, as far as it is known; all ranks call this."""
    check_name(folder.name)
    if choices.log is not None:
        from evenstep.trackers import check_installed

        check_installed(parse_log(choices.log), "log")
    world = team.world
    names = world.gather([str(device) for device in (*world.devices, *world.delegated)])
    of_machine = names[: read_local_size() or world.size]
    devices_used = tuple(name for of_rank in of_machine for name in of_rank)
    return Plan(
        task=CUSTOM_LOOP,
        name=folder.name,
        strategy=team.facts.name,
        devices=devices_used,
        batch=max(loader.batch, (world.num_virtual or len(devices_used)) * loader.accumulate),
        accumulate=loader.accumulate,
        virtual_replicas=world.num_virtual,
        precision=team.precision.name,
        seed=team.seed,
        log=choices.log,
        best=choices.best,
    )
