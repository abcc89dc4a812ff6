"""A study on disk: `study.jsonl` is the truth, and what happens next is a function of it.

So a command that was killed goes on where it was.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, get_args

from evenstep.errors import BadInput, shorten
from evenstep.record import STUDY_FILE, TRIALS, end_of_rows
from evenstep.task_options import value_in_words
from evenstep.tune.study_rows import StudyRequest, StudyRow
from evenstep.tune.successive_halving import Study, StudyTrial
from evenstep.typed_values import MALFORMED, Schema, in_words

FILE = STUDY_FILE


@dataclass(frozen=True)
class _RowKind:
    kind: str


_NAME = "study"
_KIND: Schema[_RowKind] = Schema(_RowKind, _NAME)
_KINDS = {kind.__name__.lower(): kind for kind in get_args(StudyRow)}
_ROWS: dict[str, Schema[StudyRow]] = {name: Schema(kind, _NAME) for name, kind in _KINDS.items()}


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
