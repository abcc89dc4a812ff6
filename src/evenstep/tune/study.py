"""A study on disk, and its rule: which trial runs next, how far, and what a suggestion may see.

`study.jsonl` is the truth: what was requested, each suggestion, and each rung that a trial reached. What happens next
is a function of it, so a command that was killed goes on where it was. Results count by the number of a trial and by
rung, never by the clock: a study has the same suggestions and promotions however long its trials take.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, get_args

from evenstep.errors import BadInput, shorten
from evenstep.plan import Direction, OptionValue, parse_best
from evenstep.record import STUDY_FILE, TRIALS, end_of_rows
from evenstep.schema import MALFORMED, Natural, Positive, Schema, in_words
from evenstep.task import value_in_words
from evenstep.tune.space import Dimension

FILE = STUDY_FILE
ROUNDS_BEHIND = 2
"""A suggestion does not see the trials of the last two rounds of all slots: they may still be running."""


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """What a study does; a command that continues it asks for the same."""

    task: str
    space: list[Dimension]
    trials: Positive
    rungs: list[Positive]
    """Epochs at which trials are compared, the last one their whole length; empty: every trial runs to its end."""
    metric: str
    """`accuracy:max`."""
    sampler: str
    seed: Natural
    slots: Positive
    """Trials at a time for which the study was made; it may run on fewer or more devices later."""
    per_trial: Positive
    """Devices of a trial."""
    choices: dict[str, Any] = field(default_factory=dict)
    """Fields of the Plan that all trials have in common."""
    command: str = ""
    pruner: str = "halving"
    """`halving` is the study's own rule; others are Optuna's."""

    @property
    def search(self) -> dict[str, str]:
        """The space as it was written."""
        return {one.name: one.text for one in self.space}

    @property
    def num_rungs(self) -> int:
        return max(1, len(self.rungs))

    @property
    def direction(self) -> Direction:
        return parse_best(self.metric)[1]

    @property
    def has_pruner(self) -> bool:
        """Whether one of Optuna's pruners takes the place of the study's own rule."""
        return self.pruner != "halving"

    @property
    def quotas(self) -> list[int]:
        """Trials of each rung: as many go on as give every rung about the same number of epochs.

        >>> StudyRequest(task="a", space=[], trials=24, rungs=[1, 3, 9], metric="loss:min", sampler="tpe", seed=0,
        ...     slots=2, per_trial=1).quotas
        [24, 8, 2]
        """
        sizes = [self.trials]
        for before, after in zip(self.rungs, self.rungs[1:], strict=False):
            sizes.append(max(1, sizes[-1] * before // after))
        return sizes


@dataclass(frozen=True, kw_only=True)
class CommandStart:
    """A command began the study, or goes on with it."""

    devices: list[str]
    at: float
    """In seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class SuggestedTrial:
    """The options of a trial."""

    trial: Positive
    options: dict[str, OptionValue]


@dataclass(frozen=True, kw_only=True)
class Began:
    """A trial was started, or went on, towards a rung."""

    trial: Positive
    rung: Natural
    devices: list[str]
    at: float


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A trial has reached a rung."""

    trial: Positive
    rung: Natural
    value: float
    """The best of the metric up to here."""
    step: Natural
    epoch: Natural
    values: dict[str, float] = field(default_factory=dict)
    """The evaluation that had it."""
    best_step: Natural | None = None
    """Of that evaluation; rows of earlier versions lack it."""
    is_over: bool = False
    """Whether the run has ended: at its last epoch, or early."""
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrialFailed:
    """A trial has failed on its way to a rung."""

    trial: Positive
    rung: Natural
    why: str
    step: Natural = 0
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PrunerDecision:
    """Whether a trial goes on from a rung, by one of Optuna's pruners; one that does not stays paused."""

    trial: Positive
    rung: Natural
    goes_on: bool


StudyRow = StudyRequest | CommandStart | SuggestedTrial | Began | Reached | TrialFailed | PrunerDecision


@dataclass(frozen=True)
class _RowKind:
    kind: str


_NAME = "study"
_KIND: Schema[_RowKind] = Schema(_RowKind, _NAME)
_KINDS = {kind.__name__.lower(): kind for kind in get_args(StudyRow)}
_ROWS: dict[str, Schema[StudyRow]] = {name: Schema(kind, _NAME) for name, kind in _KINDS.items()}


@dataclass
class StudyTrial:
    """One trial, as far as the study's rows know it."""

    number: int
    options: dict[str, OptionValue]
    reached: list[Reached] = field(default_factory=list)
    """A row for each rung."""
    failed: TrialFailed | None = None
    began: list[Began] = field(default_factory=list)
    decisions: dict[int, bool] = field(default_factory=dict)
    """Of a pruner, by rung: whether it goes on."""

    @property
    def folder(self) -> str:
        return f"{self.number:04d}"

    @property
    def last(self) -> Reached | None:
        return self.reached[-1] if self.reached else None

    @property
    def steps(self) -> int:
        """Steps of its run so far."""
        return max(self.last.step if self.last else 0, self.failed.step if self.failed else 0)


@dataclass(frozen=True)
class TrialJob:
    """A trial, and the rung that it runs to."""

    trial: int
    rung: int


@dataclass
class Study:
    """What has happened so far, and what follows from it."""

    request: StudyRequest
    trials: dict[int, StudyTrial] = field(default_factory=dict)
    commands: list[list[float]] = field(default_factory=list)
    """Of each command: when it started trials, and when it had results."""

    def add(self, row: StudyRow) -> None:
        if isinstance(row, Began | Reached | TrialFailed) and self.commands:
            self.commands[-1].append(row.at)
        match row:
            case StudyRequest():
                self.request = row
            case CommandStart():
                self.commands.append([])
            case SuggestedTrial():
                self.trials[row.trial] = StudyTrial(row.trial, row.options)
            case Began():
                self.trials[row.trial].began.append(row)
            case Reached():
                self.trials[row.trial].reached.append(row)
            case TrialFailed():
                self.trials[row.trial].failed = row
            case PrunerDecision():
                self.trials[row.trial].decisions[row.rung] = row.goes_on

    @cached_property
    def sign(self) -> int:
        """Of a metric whose smaller values are better."""
        return 1 if self.request.direction == "min" else -1

    def ranking(self, rung: int) -> list[StudyTrial]:
        """The trials that have reached a rung, the best first; of equal ones, the one that was suggested first."""
        there = [trial for trial in self.trials.values() if len(trial.reached) > rung]
        return sorted(there, key=lambda trial: (self.sign * trial.reached[rung].value, trial.number))

    def num_failed(self, rung: int) -> int:
        """Trials that have failed on their way to it."""
        return sum(trial.failed is not None and trial.failed.rung == rung for trial in self.trials.values())

    def size(self, rung: int) -> int:
        """Trials that a rung has in the end, as far as it is known."""
        if rung == 0:
            return self.request.trials
        return min(self.request.quotas[rung], self.size(rung - 1) - self.num_failed(rung - 1))

    def promoted(self, rung: int) -> list[StudyTrial]:
        """The trials that are certain to go on from this rung, the best first.

        A trial goes on as soon as no result that is still missing can take its place: devices need not wait for the
        whole rung, and no trial goes on that would not if they did.
        """
        if rung + 1 >= self.request.num_rungs:
            return []
        ranked = self.ranking(rung)
        if self.request.has_pruner:
            return [trial for trial in ranked if trial.decisions.get(rung)]
        missing = self.size(rung) - len(ranked) - self.num_failed(rung)
        return ranked[: max(0, self.size(rung + 1) - missing)]

    def to_decide(self) -> list[TrialJob]:
        """The rungs from which a pruner can now say whether a trial goes on.

        It sees what a suggestion of the same number sees, to the end: the result does not depend on the clock.
        """
        open_ones = [trial for trial in self.trials.values() if not self._is_final(trial)]
        first = min((trial.number for trial in open_ones), default=0)
        return [
            TrialJob(trial.number, len(trial.reached) - 1)
            for trial in open_ones
            if self._is_undecided(trial) and trial.number - self.behind < first
        ]

    def _is_undecided(self, trial: StudyTrial) -> bool:
        at = len(trial.reached)
        return self.request.has_pruner and 0 < at < self.request.num_rungs and at - 1 not in trial.decisions

    def _is_final(self, trial: StudyTrial) -> bool:
        """Whether a trial takes no more steps."""
        at = len(trial.reached)
        return trial.failed is not None or at == self.request.num_rungs or trial.decisions.get(at - 1) is False

    def jobs(self) -> list[TrialJob]:
        """What can run now, the longest first: promotions, then trials that were suggested."""
        found = [
            TrialJob(trial.number, rung + 1)
            for rung in reversed(range(self.request.num_rungs - 1))
            for trial in self.promoted(rung)
            if len(trial.reached) == rung + 1 and trial.failed is None
        ]
        new = [trial for trial in self.trials.values() if not trial.reached and trial.failed is None]
        return [*found, *(TrialJob(trial.number, 0) for trial in new)]

    def next_number(self) -> int | None:
        """The trial that can be suggested now; None if all were, or if results that it is to see are missing."""
        number = len(self.trials) + 1
        if number > self.request.trials:
            return None
        seen = self.seen_by(number)
        return number if len(seen) == max(0, number - self.behind) else None

    def seen_by(self, number: int) -> list[StudyTrial]:
        """The trials whose first rung a suggestion sees, whatever else is known by then."""
        last = number - self.behind
        seen = [trial for trial in self.trials.values() if trial.number <= last]
        return [trial for trial in seen if trial.reached or trial.failed is not None]

    @property
    def behind(self) -> int:
        """Trials before a suggestion that it does not see."""
        return ROUNDS_BEHIND * self.request.slots

    @property
    def is_over(self) -> bool:
        return len(self.trials) >= self.request.trials and not self.jobs() and not self.to_decide()

    @property
    def best(self) -> StudyTrial | None:
        """The best of those that have come furthest."""
        for rung in reversed(range(self.request.num_rungs)):
            if ranked := self.ranking(rung):
                return ranked[0]
        return None

    @property
    def steps(self) -> int:
        return sum(trial.steps for trial in self.trials.values())

    @property
    def whole_steps(self) -> int | None:
        """Steps that all trials would have taken to their end; None if none has come there."""
        lengths = [trial.reached[-1].step for trial in self.ranking(self.request.num_rungs - 1)]
        return max(lengths) * len(self.trials) if lengths else None


def rows(file: IO[bytes]) -> Iterator[StudyRow]:
    """The rows of a study; a half-written last line is none."""
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            kind = _KIND.decode(line).kind
            if kind in _ROWS:
                yield _ROWS[kind].decode(line)
        except MALFORMED as error:
            raise _KIND.refusal(file.name, f"line {number}, {in_words(error)}") from error


def read_study(folder: Path) -> Study:
    """The study of a folder."""
    path = folder / FILE
    if not os.path.isfile(path):
        why = f"is not a study (it has no {FILE})" if os.path.exists(folder) else "does not exist"
        raise BadInput(f"{shorten(str(folder))} {why}; give the folder of a study, such as runs/my_task-tune")
    try:
        with path.open("rb") as file:
            return _study(file)
    except OSError as error:
        raise _KIND.refusal(path, error.strerror or str(error)) from error


def _study(file: IO[bytes]) -> Study:
    found = rows(file)
    first = next(found, None)
    if not isinstance(first, StudyRequest):
        raise _KIND.refusal(file.name, "it does not begin with what was requested")
    study = Study(first)
    for number, row in enumerate(found, 2):
        try:
            study.add(row)
        except KeyError as error:
            raise _KIND.refusal(file.name, f"line {number} is of trial {error}, which was never suggested") from error
    return study


class StudyLog:
    """The rows of a study that this command continues; nobody else may, while it runs."""

    def __init__(self, folder: Path, request: StudyRequest) -> None:
        """Begin a study, or go on with the one that lies in `folder`."""
        self.folder = folder
        try:
            (folder / TRIALS).mkdir(parents=True, exist_ok=True)
            self._file = (folder / FILE).open("a+b")
        except OSError as error:
            raise BadInput(f"{folder} cannot be written ({error.strerror}); give another --out") from error
        try:
            self._lock()
            # What a killed command left half-written: the next row would be appended to it.
            self._file.truncate(end_of_rows(self._file))
            self._file.seek(0)
            self.is_new = not self._file.read(1)
            self._file.seek(0)
            self.study = Study(request) if self.is_new else _study(self._file)
            _refuse_other(folder, self.study.request, request)
        except BadInput:
            self._file.close()
            raise
        if self.is_new:
            self.append(request)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"{self.folder} is being run by another evenstep tune; wait, or give another --name"
            ) from None
        except OSError:  # a file system without locks
            pass

    @property
    def described(self) -> str:
        """What this command begins, or goes on with, in one line."""
        request, num = self.study.request, len(self.study.trials)
        rungs, sizes = (", ".join(map(str, numbers)) for numbers in (request.rungs, request.quotas))
        halving = f"; {sizes} of them reach epochs {rungs}" if request.rungs else ""
        if request.has_pruner:
            halving = f"; compared at epochs {rungs} by Optuna's {request.pruner} pruner"
        which = self.folder if self.is_new else f"continuing {self.folder}, {num} trials suggested"
        return f"{which}: {request.trials} trials, {request.slots} at a time{halving}"

    def append(self, row: StudyRow) -> None:
        """Write a row, to the disk: what follows from it may be started at once."""
        values = {"kind": type(row).__name__.lower(), **asdict(row)}
        self._file.write(json.dumps(values).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.study.add(row)

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        """Remove a study of which no trial could be started."""
        self.close()
        shutil.rmtree(self.folder)


def _refuse_other(folder: Path, before: StudyRequest, now: StudyRequest) -> None:
    """A study is continued by the same command; only its devices may be others."""
    old, new = _compared(before), _compared(now)
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if changed:
        name = changed[0]
        was, given = (_in_a_command(name, one.get(name)) for one in (old, new))
        if old.get(name) is None:
            given = f"and {given} was given"
        else:
            given = "which was not given" if new.get(name) is None else f"not {given}"
        raise BadInput(f"{folder} is another study: it has {was}, {given}; give --name for a new one")


def _compared(request: StudyRequest) -> dict[str, Any]:
    """What makes two requests different: the number of threads, for example, follows from the devices."""
    names = ("task", "trials", "metric", "sampler", "seed", "per_trial")
    choices = {name: value for name, value in request.choices.items() if name != "threads"}
    options = {name: value_in_words(value) for name, value in choices.pop("options", {}).items()}
    return {
        **{name: getattr(request, name) for name in names},
        "rungs": ",".join(map(str, request.rungs)) or None,
        "prune": request.pruner,
        "search": [*request.search.items()],
        "options": options or None,
        **choices,
    }


def _in_a_command(name: str, value: Any) -> str:
    """`--trials 12`, `the task my_task.py`, `no --batch`."""
    flag = f"--{name.replace('_', '-')}"
    if name == "task":
        return f"the task {shorten(str(value))}"
    if value is None:
        return "no options" if name == "options" else f"no {flag}"
    if name == "search":
        return " ".join(f"--search {one}={text}" for one, text in value)
    if name == "options":
        return " ".join(f"{one}={text}" for one, text in value.items())
    return f"{flag} {shorten(str(value))}"


def is_usable(value: float | None) -> bool:
    """Whether a metric can be compared."""
    return value is not None and math.isfinite(value)


@dataclass(frozen=True)
class StudyFacts:
    """A study in numbers, as `--json` prints them."""

    num_trials: int
    failed: int
    steps: int
    """Of all trials."""
    whole_steps: int | None
    """That all trials would have taken to their end; None if none has come there."""
    seconds: float
    """From the first start of a trial to the last result, of each command."""
    busy: float
    """The part of it in which devices had a trial."""

    @property
    def saved(self) -> float | None:
        """The part of the steps that was not needed."""
        return 1 - self.steps / self.whole_steps if self.whole_steps else None


def facts_of(study: Study) -> StudyFacts:
    """Without the times between two commands that continue one study."""
    trials = study.trials.values()
    seconds = sum(max(times) - min(times) for times in study.commands if times)
    used = sum(sum(_device_seconds(trial)) for trial in trials)
    return StudyFacts(
        num_trials=len(study.trials),
        failed=sum(trial.failed is not None for trial in trials),
        steps=study.steps,
        whole_steps=study.whole_steps,
        seconds=seconds,
        busy=used / (seconds * study.request.slots * study.request.per_trial) if seconds else 0.0,
    )


def _device_seconds(trial: StudyTrial) -> Iterator[float]:
    """From the last start towards each rung to its result, for all devices."""
    ends = [(row.rung, row.at) for row in trial.reached]
    if trial.failed is not None:
        ends.append((trial.failed.rung, trial.failed.at))
    for rung, end in ends:
        starts = [row for row in trial.began if row.rung == rung and row.at <= end]
        if starts:
            yield (end - starts[-1].at) * len(starts[-1].devices)
