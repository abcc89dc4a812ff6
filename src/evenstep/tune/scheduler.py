"""Runs a study: trials are ordinary runs, several at a time, each with its own ranks on its own devices."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from evenstep.best_metric import find_metric, parse_best
from evenstep.checkpoint import integrity
from evenstep.distributed.devices import num_cores
from evenstep.errors import BadInput, CheckpointError, EvenstepError, PlanError, Preempted, shorten
from evenstep.launcher.failure import KILLED
from evenstep.launcher.launch import run_one_of_several
from evenstep.launcher.prepare import label_of, prepare
from evenstep.launcher.supervisor import WAITING, StopSignals
from evenstep.plan import PLAN_FILE, RUNS, Plan, check_name, read_plan
from evenstep.record import FILE, TRIALS, Evaluation, Record, RunEnd, Step, has_begun, is_written, write_end
from evenstep.sampling.rng import seed_everything
from evenstep.strategy_facts import DEFAULT, REFERENCE
from evenstep.task import absolute_spec, find_task
from evenstep.training.trainer import Event, perform
from evenstep.tune.optuna_pruner import check_pruner, goes_on
from evenstep.tune.optuna_sampler import Mirror, check_space, need_optuna, suggest
from evenstep.tune.packing import find_devices, fitting, largest, parse_per_device
from evenstep.tune.space import grid, in_words, parse_search
from evenstep.tune.study import StudyLog, is_usable
from evenstep.tune.study_rows import (
    Began,
    CommandStart,
    PrunerDecision,
    Reached,
    StudyRequest,
    StudyRow,
    SuggestedTrial,
    TrialFailed,
)
from evenstep.tune.successive_halving import TrialJob
from evenstep.tune.train_to_rung import train_to

DEFAULT_TRIALS = 16
MOST_NAME = 80
"""Characters of a task in the name of a study."""
RESTARTS = 3
"""Of a trial, after crashes: a rank that was killed from outside is no fault of the trial's options."""
DYING_SECONDS = 10.0
"""How long the ranks of a command that was killed may take to end."""
MOST_ENDS = 3
"""Ends of a trial before its rung, by signals to its ranks, after which it counts as failed."""


@dataclass(frozen=True, kw_only=True)
class TuneCommand:
    """What `evenstep tune` was given."""

    task: str
    search: Sequence[str]
    trials: int | None = None
    devices: str = "1"
    per_trial: int = 1
    per_device: str = "1"
    rungs: str | None = None
    metric: str | None = None
    sampler: str = "tpe"
    pruner: str = "halving"
    seed: int = 0
    choices: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Plan that all trials have in common."""
    name: str | None = None
    out: str | None = None
    command: str = ""


@dataclass(frozen=True)
class TuneStart:
    """A study that is ready to run."""

    log: StudyLog
    devices: tuple[str, ...]
    """A device that trials share is listed once for each."""
    notes: tuple[str, ...] = ()


def begin(given: TuneCommand) -> TuneStart:
    """The study that a command begins or continues, checked, and the devices that it runs on."""
    need_optuna(given.sampler)
    devices, per_device = find_devices(given.devices, given.per_trial), parse_per_device(given.per_device)
    # Before the file is imported, as for every trial.
    seed_everything(given.seed)
    options = given.choices.get("options") or {}
    space = parse_search(given.search, find_task(given.task), options)
    check_space(given.sampler, space)
    combinations = grid(space) if given.sampler == "grid" else None
    trials = given.trials or (len(combinations) if combinations else DEFAULT_TRIALS)
    rungs = parse_rungs(given.rungs)
    check_pruner(given.pruner, rungs)
    choices = _choices(given, rungs)
    notes: tuple[str, ...] = ()
    if per_device is None:
        fields = {**choices, "seed": given.seed, "out": given.out, "options": {**options, **largest(space)}}
        per_device, note = fitting(given.task, devices, given.per_trial, fields)
        notes = (note,)
    devices *= per_device
    if set(devices) == {"cpu"}:
        # As in the plan of one run on all of them; what is in a plan gives the same bits again.
        choices.setdefault("threads", max(1, num_cores() // len(devices)))
    request = StudyRequest(
        task=absolute_spec(given.task),
        space=space,
        trials=min(trials, len(combinations)) if combinations else trials,
        rungs=rungs,
        metric=parse_metric(given.metric),
        sampler=given.sampler,
        pruner=given.pruner,
        seed=given.seed,
        slots=len(devices) // given.per_trial,
        per_trial=given.per_trial,
        choices=choices,
        command=given.command,
    )
    name = given.name or f"{label_of(given.task, options)[:MOST_NAME]}-tune"
    check_name(name)
    return TuneStart(StudyLog(Path(given.out or RUNS) / name, request), devices, notes)


def _choices(given: TuneCommand, rungs: Sequence[int]) -> dict[str, Any]:
    """Fields of the Plan that all trials have in common."""
    choices = {name: value for name, value in given.choices.items() if value is not None}
    if rungs and choices.get("epochs") not in (None, rungs[-1]):
        raise BadInput(f"--rungs {given.rungs} ends at epoch {rungs[-1]}, the length of a whole trial; omit --epochs")
    return {**choices, "epochs": rungs[-1]} if rungs else choices


def parse_rungs(text: str | None) -> list[int]:
    """`1,3,9`

    >>> parse_rungs("1,3,9"), parse_rungs(None)
    ([1, 3, 9], [])
    """
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    found = [int(word) for word in words if re.fullmatch(r"[1-9]\d{0,8}", word)]
    if len(found) < len(words) or found != sorted(set(found)):
        raise BadInput(f"--rungs is {shorten(repr(text))}; write growing numbers of epochs, such as 1,3,9")
    return found


def parse_metric(text: str | None) -> str:
    """The metric with its direction.

    >>> parse_metric("valid.accuracy"), parse_metric("score:max"), parse_metric(None)
    ('accuracy:max', 'score:max', 'loss:min')
    """
    try:
        return ":".join(parse_best(text.removeprefix("valid.") if text is not None else None))
    except PlanError as error:
        raise BadInput(str(error).replace("--best", "--metric")) from error


@dataclass
class RunningTrial:
    """A trial on its way to a rung."""

    job: TrialJob
    devices: tuple[str, ...]
    folder: Path
    events: Generator[Event, None, None]
    step: int = 0
    epoch: int = 0
    loss: float | None = None


class Scheduler:
    """The trials that one command runs."""

    def __init__(self, log: StudyLog, devices: Sequence[str]) -> None:
        self.study, self.request = log.study, log.study.request
        self.running: list[RunningTrial] = []
        self.stop = StopSignals()
        self._log = log
        self._free = _groups(devices, self.request.per_trial)
        self._devices = self._free[0]
        self._plans: dict[int, Plan] = {}
        """Of new trials, until they are started."""
        self._refused: list[str] = []
        self._ends: Counter[TrialJob] = Counter()
        self._mirror = Mirror(log.folder, log.study)
        self._is_copied = True

    def run(self) -> Iterator[str]:
        """Carry the study out. Yields a line for each thing that happens, and an empty one at every look at the trials.

        Ctrl-C and SIGTERM stop all trials, with checkpoints.
        """
        self._append(CommandStart(devices=[name for one in self._free for name in one], at=time.time()))
        was_stopped = False
        with self.stop.listening():
            try:
                while not self.study.is_over and (self.stop.number is None or self.running):
                    if self.stop.number is not None and not was_stopped:
                        was_stopped = True
                        yield "stopping: the trials that run save checkpoints"
                    yield from self._start_trials()
                    for trial in [*self.running]:
                        yield from self._watch(trial)
                        if self._free:
                            # At once: to look at the other trials takes a moment for each.
                            yield from self._start_trials()
                    yield ""
                    # After trials were started: a device would wait for the disk.
                    self._copy()
                    if not self.running:
                        time.sleep(0.02)
            finally:
                for trial in self.running:
                    trial.events.close()
        if self.stop.number is not None:
            how = KeyboardInterrupt if self.stop.number == signal.SIGINT else Preempted
            raise how(f"stopped, with checkpoints; the same command continues the study in {self._log.folder}")
        self._copy()
        self._mirror.finish()
        if self._mirror.problem:
            yield self._mirror.problem

    def _copy(self) -> None:
        if not self._is_copied:
            self._mirror.update()
            self._is_copied = True

    def _start_trials(self) -> Iterator[str]:
        """Start what can start; while all devices are busy, make the next trial ready."""
        self._decide()
        while self._free and self.stop.number is None:
            job = next(iter(self._waiting()), None)
            if job is not None:
                yield from self._start(job)
            elif (yield from self._suggest()) is None:
                return
        if self.stop.number is None and not any(job.rung == 0 for job in self._waiting()):
            yield from self._suggest()

    def _decide(self) -> None:
        """Let a pruner say which trials go on, where it has what it needs."""
        for job in self.study.to_decide():
            self._append(PrunerDecision(trial=job.trial, rung=job.rung, goes_on=goes_on(self.study, job.trial)))

    def _waiting(self) -> list[TrialJob]:
        running = {trial.job.trial for trial in self.running}
        return [job for job in self.study.jobs() if job.trial not in running]

    def _suggest(self) -> Generator[str, None, int | None]:
        """Suggest the next trial and check it; returns its number, None if none can be suggested now."""
        number = self.study.next_number()
        if number is not None:
            self._append(SuggestedTrial(trial=number, options=suggest(self.study, number)))
            yield from self._prepare(number)
        return number

    def _prepare(self, number: int) -> Iterator[str]:
        """Check a new trial, and make its folder; one that cannot be trained has failed."""
        try:
            self._plans[number] = self._checked(number)
        except BadInput as error:
            why = str(error).replace("--best", "--metric")
            self._refused.append(why)
            if number == min(2, self.request.trials) and self._refused == [why] * number:
                # It is the task that is wrong, not the options of a trial.
                self._log.discard()
                raise BadInput(why) from error
            yield self._fail(TrialJob(number, 0), why)

    def _checked(self, number: int) -> Plan:
        request, folder = self.request, self._folder(number)
        if os.path.isfile(folder / PLAN_FILE):
            return read_plan(folder)
        # A command may have been killed before the plan was written.
        shutil.rmtree(folder, ignore_errors=True)
        fixed = {"devices": list(self._devices), "name": folder.name, "out": str(folder.parent)}
        options = {**request.choices.get("options", {}), **self.study.trials[number].options}
        chosen = {**request.choices, "best": request.metric, "restarts": RESTARTS, "seed": request.seed}
        prepared = prepare(request.task, {**chosen, **fixed, "options": options})
        if prepared.task.valid is None:
            shutil.rmtree(folder)
            raise BadInput("tune compares trials by their validation data, and the task has none; give it `valid`")
        return prepared.plan

    def _start(self, job: TrialJob) -> Iterator[str]:
        folder = self._folder(job.trial)
        if job.rung == 0 and job.trial not in self._plans:
            yield from self._prepare(job.trial)
            if job.trial not in self._plans:
                return
        plan = self._plans.pop(job.trial, None) or read_plan(folder)
        _wait_for_end(folder)
        found = self._result(job)
        if found is not None:
            # A command was killed after the trial had come here.
            yield self._reach(found)
            return
        plan = replace(plan, **self._take_devices(plan), resume=_newest(folder))
        self._append(Began(trial=job.trial, rung=job.rung, devices=list(plan.devices), at=time.time()))
        ends = job.rung + 1 == self.request.num_rungs
        how = perform if ends else partial(train_to, epochs=self.request.rungs[job.rung])
        events = run_one_of_several(plan, folder, self.stop, how)
        trial = RunningTrial(job, plan.devices, folder, events)
        self.running.append(trial)
        if job.rung:
            on = f" on {len(plan.devices)} devices" if len(plan.devices) > self.request.per_trial else ""
            yield f"trial {job.trial} goes on to epoch {self.request.rungs[job.rung]}{on}"
        # The first look starts its ranks.
        yield from self._watch(trial)

    def _take_devices(self, plan: Plan) -> dict[str, Any]:
        """Devices for a trial. With virtual replicas it may have those that nobody else will need: its bits stay."""
        shares = len(self._free) // max(1, len(self._waiting()))
        is_end = len(self.study.trials) == self.request.trials
        num = (
            max(1, min(shares, plan.virtual_replicas // self.request.per_trial))
            if plan.virtual_replicas and is_end
            else 1
        )
        taken = tuple(name for one in self._free[:num] for name in one)
        del self._free[:num]
        strategy = plan.strategy if num == 1 or plan.strategy != REFERENCE else DEFAULT
        return {"devices": taken, "strategy": strategy}

    def _watch(self, trial: RunningTrial) -> Iterator[str]:
        """Look at what a trial has done since the last time."""
        try:
            for event in trial.events:
                if event == WAITING:
                    return
                if isinstance(event, Step):
                    trial.step, trial.epoch, trial.loss = event.step, event.epoch + 1, event.loss
                elif isinstance(event, str) and event.startswith("restart "):
                    yield f"trial {trial.job.trial}: {event}"
        except (Preempted, KeyboardInterrupt):
            if self.stop.is_urgent:
                raise
        except EvenstepError as error:
            first, _, _ = str(error).partition("\n")
            if KILLED not in first:
                self._leave(trial)
                write_end(trial.folder, RunEnd(state="failed", why=first))
                yield self._fail(trial.job, _first_cause(str(error)), trial.step)
                return
        self._leave(trial)
        yield from self._ended(trial)

    def _leave(self, trial: RunningTrial) -> None:
        self.running.remove(trial)
        self._free += _groups(trial.devices, self.request.per_trial)

    def _ended(self, trial: RunningTrial) -> Iterator[str]:
        """At its rung, at its end, or by a signal."""
        found, job = self._result(trial.job), trial.job
        if found is not None:
            if not found.is_over:
                write_end(
                    trial.folder, RunEnd(state="stopped", why=f"paused after epoch {found.epoch} by evenstep tune")
                )
            yield self._reach(found)
            return
        write_end(trial.folder, RunEnd(state="stopped", why="a stop signal"))
        self._ends[job] += self.stop.number is None
        if self._ends[job] >= MOST_ENDS:
            yield self._fail(job, f"it ended {MOST_ENDS} times before its rung, without an error", trial.step)

    def _result(self, job: TrialJob) -> Reached | None:
        """What the Record of a trial has of a rung; None if it has not come there."""
        folder = self._folder(job.trial)
        if not has_begun(folder):
            return None
        record = Record.read(folder, kinds=("evaluation", "summary"))
        epochs = self.request.rungs[job.rung] if self.request.rungs else None
        is_over = record.summary is not None
        known = [one for one in record.evaluations if epochs is None or one.epoch < epochs]
        if not known or not (is_over or (epochs is not None and known[-1].epoch + 1 == epochs)):
            return None
        best = self._best(known)
        value = best.values[find_metric(parse_best(self.request.metric)[0], best.values) or ""]
        return Reached(
            trial=job.trial,
            rung=job.rung,
            value=value,
            step=known[-1].step,
            epoch=known[-1].epoch + 1,
            values=best.values,
            best_step=best.step,
            is_over=is_over,
            at=time.time(),
        )

    def _best(self, known: Sequence[Evaluation]) -> Evaluation:
        """By the metric; of equal ones the first."""
        metric, direction = parse_best(self.request.metric)
        sign = 1 if direction == "min" else -1

        def key(one: Evaluation) -> float:
            value = one.values[find_metric(metric, one.values) or ""]
            return sign * value if is_usable(value) else float("inf")

        return min(known, key=key)

    def _reach(self, found: Reached) -> str:
        if not is_usable(found.value):
            return self._fail(
                TrialJob(found.trial, found.rung), f"its {self.request.metric} is {found.value}", found.step
            )
        before = self.study.best
        self._append(found)
        where = f"epoch {found.epoch}" if self.request.rungs else "its end"
        is_best = self.study.best is not before and self.study.best is self.study.trials[found.trial]
        value = f"best {parse_best(self.request.metric)[0]} {found.value:.4f} (step {found.best_step})"
        options = in_words(self.study.trials[found.trial].options)
        return f"trial {found.trial} reached {where}: {value}{', the best trial so far' * is_best}  {options}"

    def _fail(self, job: TrialJob, why: str, step: int = 0) -> str:
        self._append(TrialFailed(trial=job.trial, rung=job.rung, why=why, step=step, at=time.time()))
        return f"trial {job.trial} failed: {why}  {in_words(self.study.trials[job.trial].options)}"

    def _folder(self, number: int) -> Path:
        return self._log.folder / TRIALS / self.study.trials[number].folder

    def _append(self, row: StudyRow) -> None:
        self._log.append(row)
        self._is_copied = False


def _groups(devices: Sequence[str], num: int) -> list[tuple[str, ...]]:
    return [tuple(devices[at : at + num]) for at in range(0, len(devices), num)]


def _newest(folder: Path) -> str | None:
    """The checkpoint from which a trial goes on; None if it has none."""
    try:
        return str(integrity.find(str(folder))[0])
    except CheckpointError:
        return None


def _wait_for_end(folder: Path) -> None:
    """Ranks of a command that was killed end soon after it; two may not write one Record."""
    deadline = time.monotonic() + DYING_SECONDS
    while has_begun(folder) and is_written(folder / FILE) and time.monotonic() < deadline:
        time.sleep(0.05)


def _first_cause(message: str) -> str:
    """`rank 0 failed at step 7, in forward: ValueError: ...`, of the many lines that a failed run prints."""
    lines = [line for line in message.splitlines() if line and not line.startswith((" ", "full logs", "continue from"))]
    return ": ".join(lines[:2])
