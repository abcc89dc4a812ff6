"""The runs of one training: what they promise, and where each goes on.

The ids of one epoch: which came again, which did not come, which are none.

The verdict on a chain of runs, step by step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.audit.samples import FILE, Ids, Line, Problems, counted, samples_file, unreadable
from evenstep.errors import BadInput
from evenstep.record import Drawn, Record
from evenstep.sampling.order import Lengths


@dataclass(frozen=True)
class Promise:
    """What the samples of an epoch should be; the same in all runs of a chain."""

    sampler: str
    repeats: bool
    num_samples: int | None
    lengths: Lengths
    dropped: Lengths
    """Samples that drop_last leaves out of each epoch; they are not in `lengths`."""
    seed: int

    @property
    def is_stream(self) -> bool:
        """Ids are then places in the stream, so that an epoch has 0, 1, 2 and so on."""
        return self.num_samples is None

    def difference(self, later: Promise) -> str | None:
        """Why a run of the other promise cannot go on where one of this promise ended."""
        for name in ("sampler", "repeats", "num_samples", "seed"):
            one, other = getattr(self, name), getattr(later, name)
            if one != other:
                return f"{name.replace('_', ' ')} is {one} in one and {other} in the other"
        # A stream learns how long its epochs are by finishing them.
        known = len(self.lengths.first) if self.lengths.rest is None else None
        if self.lengths != Lengths(later.lengths.rest, later.lengths.first[:known]):
            return "their epochs have different lengths"
        return None


@dataclass(frozen=True)
class Run:
    """One folder of a chain, or what came after a restart in it, and from where it goes on."""

    folder: Path
    file: Path
    promise: Promise
    step: int
    position: int
    last_step: int | None
    """None if it did not come to its end."""
    resumed_from: str | None
    """The name of the run whose checkpoint it loaded."""
    lost_files: tuple[Path, ...] = ()
    """Samples of attempts of which nothing is left: a later one went on from before their beginning."""


def read_chain(runs: Sequence[str | Path]) -> list[Run]:
    """The runs by where they begin, so that each goes on from one before it; of two that begin alike, as given."""
    if not runs:
        raise BadInput("no run given; evenstep audit takes the folders of one or more runs")
    folders = {path.resolve(): path for path in map(_folder, runs)}
    chain = sorted((run for folder in folders.values() for run in _read(folder)), key=lambda run: run.step)
    for one, other in pairwise(chain):
        if one.folder == other.folder:
            continue
        difference = one.promise.difference(other.promise) or _no_descent(one, other, chain)
        if difference:
            raise BadInput(
                f"{one.folder} and {other.folder} are not parts of one training: {difference}.\n"
                "Give a run together with those that were resumed from it, or one run alone"
            )
    return chain


def _no_descent(one: Run, other: Run, chain: Sequence[Run]) -> str | None:
    """Why a run cannot have gone on from those before it, or been begun again in place of one that was cut off."""
    if one.last_step is not None and other.step < one.last_step:
        return f"the first came to its end at step {one.last_step}, and the other begins at step {other.step}"
    earlier = {run.folder.resolve().name for run in chain if run is not other}
    if other.step and other.resumed_from is not None and other.resumed_from not in earlier:
        return f"the other was resumed from {other.resumed_from}, which was not given"
    return None


def _folder(run: str | Path) -> Path:
    """The run folder; one of its files may be given for it."""
    return Path(run).parent if os.path.isfile(run) else Path(run)


def _read(folder: Path) -> list[Run]:
    try:
        # A long run has more steps than should be held at once.
        record = Record.read(folder, kinds=("summary",))
        if not os.path.isfile(folder / FILE):
            raise BadInput(f"{folder} has no {FILE}; train it with --audit")
    except OSError as error:
        raise unreadable(folder, error) from error
    try:
        return _understood(folder, record)
    except KeyError as error:
        raise BadInput(
            f"the record of {folder} does not say how its samples are drawn (it lacks {error}); "
            "another version of evenstep wrote it"
        ) from error


def _understood(folder: Path, record: Record) -> list[Run]:
    """One for each time that the run in this folder was started, less those of which nothing is left."""
    runs: list[Run] = []
    for attempt, data in enumerate([record.data, *record.restarts], 1):
        # Records of before the file was named have one for each start.
        name = data.get("samples_file", samples_file(folder, attempt).name)
        run = _attempt(folder, folder / Path(name).name, record, data)
        lost = [earlier for earlier in runs if earlier.step >= run.step and attempt > 1]
        runs = [earlier for earlier in runs if earlier not in lost]
        files = tuple(file for one in lost for file in (*one.lost_files, one.file) if file.exists())
        runs.append(replace(run, lost_files=files))
    # Only the last one can have come to the end.
    return [*(replace(run, last_step=None) for run in runs[:-1]), runs[-1]]


def _attempt(folder: Path, file: Path, record: Record, data: Drawn) -> Run:
    lengths = Lengths(data["rest"], tuple(data["first"]))
    *first, rest = data.get("dropped") or [0]
    dropped = Lengths(rest, tuple(first))
    promise = Promise(data["sampler"], data["repeats"], data["num_samples"], lengths, dropped, record.plan.seed)
    last_step = None if record.summary is None else record.data["step"] + record.summary.steps
    # runs/NAME/checkpoints/step-...
    parents = Path(record.plan.resume or "").parents
    resumed_from = parents[1].name if record.plan.resume and len(parents) > 1 else None
    return Run(folder, file, promise, data["step"], data["position"], last_step, resumed_from)


_EXAMPLES = 3
_AT_A_TIME = 1 << 16
"""Ids that are looked at together: NumPy's cost is by call, and a step may have only a few."""
_PAGE = 1 << 20
_LARGEST_PAGE = 1 << 30
_NO_END = 1 << 62


class Epoch:
    """One epoch while its steps are read, from place `start` of it on."""

    def __init__(self, number: int, start: int, promise: Promise, seen: Seen, problems: Problems) -> None:
        length = promise.lengths.of(number)
        self.number = number
        self.start = start
        self.promised = None if length is None else length - start
        self.num_samples = 0
        self._promise = promise
        self._seen = seen
        self._problems = problems
        self._num_repeated = 0
        self._examples: list[str] = []
        self._waiting: list[int] = []
        self._steps: list[int] = []
        self._ends: list[int] = []

    @property
    def is_finished(self) -> bool:
        """Whether it has had as many samples as it has."""
        return self.promised is not None and self.num_samples >= self.promised

    def take(self, line: Line) -> None:
        """Count the samples of one step."""
        ids = line.ids
        self.num_samples += len(ids)
        if not set(map(type, ids)) <= {int}:
            odd = next(id_ for id_ in ids if type(id_) is not int)
            self._problems.add(f"step {line.step} has {json.dumps(odd)[:40]} for an id; ids are whole numbers")
            ids = [id_ for id_ in ids if type(id_) is int]
        self._waiting += ids
        self._steps.append(line.step)
        self._ends.append(len(self._waiting))
        if len(self._waiting) >= _AT_A_TIME:
            self._look()

    def count_repeated(self) -> int:
        """Samples that came again, though the sampler does not draw with replacement."""
        self._look()
        if self._num_repeated:
            examples = ", ".join(self._examples) + ", ..." * (self._num_repeated > len(self._examples))
            self._problems.add(
                f"epoch {self.number + 1} has repeated {counted(self._num_repeated, 'sample')}: {examples}"
            )
        return self._num_repeated

    def count_missed(self) -> int:
        """Samples that a finished epoch has not had."""
        self._look()
        have = self.num_samples if self._promise.repeats else self._seen.num
        promised = self.promised
        if promised is None:
            # Of a stream, all places up to the last one that was used.
            is_judged = self._promise.is_stream and not self._promise.repeats and have > 0
            promised = self._seen.highest + 1 - self.start if is_judged else have
        if have > promised:
            self._problems.add(f"epoch {self.number + 1} has had {have} samples and should have {promised}")
        elif have < promised:
            missed = f"epoch {self.number + 1} has missed {promised - have} of {counted(promised, 'sample')}"
            self._problems.add(missed + self._missed_ids(promised, promised - have))
        return max(0, promised - have)

    def _missed_ids(self, promised: int, num_missed: int) -> str:
        """The first of them, where the epoch should have had all ids that there are."""
        has_all = self._promise.is_stream or promised == self._promise.num_samples
        if self._promise.repeats or not has_all:
            return ""
        ids = list(islice(self._seen.missing(self.start, self.start + promised), _EXAMPLES))
        return f": ids {', '.join(map(str, ids))}" + ", ..." * (num_missed > len(ids))

    def _look(self) -> None:
        """Mark the ids that wait."""
        try:
            ids = np.array(self._waiting, dtype=np.int64)
        except OverflowError:
            ids = np.array(self._waiting, dtype=object)
        ends = np.array(self._ends)
        lowest, stop = self._bounds()
        is_outside = (ids < lowest) | (ids >= stop)
        for place in np.flatnonzero(is_outside)[:_EXAMPLES]:
            step = self._steps[np.searchsorted(ends, place, side="right")]
            self._problems.add(f"id {ids[place]} of step {step} is outside {self._bounds_in_words()}")
        places = np.flatnonzero(~is_outside.astype(bool))
        is_again = self._seen.mark(ids[places].astype(np.int64))
        if not self._promise.repeats:
            self._num_repeated += int(np.count_nonzero(is_again))
            for place in places[is_again][: _EXAMPLES - len(self._examples)]:
                step = self._steps[np.searchsorted(ends, place, side="right")]
                self._examples.append(f"id {ids[place]} again in step {step}")
        self._waiting, self._steps, self._ends = [], [], []

    def _bounds(self) -> tuple[int, int]:
        if not self._promise.is_stream:
            return 0, self._promise.num_samples or 0
        return self.start, _NO_END if self.promised is None else self.start + self.promised

    def _bounds_in_words(self) -> str:
        if not self._promise.is_stream:
            return f"the data ({self._promise.num_samples:,} samples)"
        upto = "on" if self.promised is None else f"to {self.start + self.promised - 1}"
        return f"this part of the stream (from place {self.start} {upto})"


class Seen:
    """Which ids have come: a byte for each, in one page, or in many where nobody knows how many there are."""

    def __init__(self, num_samples: int | None) -> None:
        self._page_size = min(num_samples or _PAGE, _LARGEST_PAGE)
        self._pages: dict[int, NDArray[np.bool_]] = {}
        self.num = 0
        self.highest = -1

    def mark(self, ids: Ids) -> NDArray[np.bool_]:
        """Mark them; True where an id had come before, be it earlier in `ids`."""
        is_again = np.zeros(len(ids), dtype=np.bool_)
        if not len(ids):
            return is_again
        self.highest = max(self.highest, int(ids.max()))
        pages = ids // self._page_size
        numbers = np.unique(pages) if pages.min() < pages.max() else pages[:1]
        for number in numbers.tolist():
            own = np.flatnonzero(pages == number)
            is_again[own] = self._mark_page(number, ids[own] % self._page_size)
        self.num += len(ids) - int(np.count_nonzero(is_again))
        return is_again

    def _mark_page(self, number: int, places: Ids) -> NDArray[np.bool_]:
        if number not in self._pages:
            self._pages[number] = np.zeros(self._page_size, dtype=np.bool_)
        page = self._pages[number]
        is_again = np.ones(len(places), dtype=np.bool_)
        unique, first = np.unique(places, return_index=True)
        is_again[first] = page[unique]
        page[unique] = True
        return is_again

    def missing(self, start: int, stop: int) -> Iterator[int]:
        """The ids from `start` to `stop` that have not come, smallest first."""
        at = start
        while at < stop:
            number, place = divmod(at, self._page_size)
            num = min(_AT_A_TIME, stop - at, self._page_size - place)
            page = self._pages.get(number)
            has_come = np.zeros(num, dtype=np.bool_) if page is None else page[place : place + num]
            yield from (at + np.flatnonzero(~has_come)).tolist()
            at += num


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the samples of a run, or of a chain of runs, show."""

    samples: int
    """Of all epochs, repeated ones included, lost work not."""
    repeated: int
    """Samples that had been there before in their epoch; 0 if the sampler draws with replacement, as it promised."""
    missed: int
    """Samples that finished epochs should have had and had not."""
    redone: int
    """Samples of steps that were lost in a crash and taken again by the next run."""
    dropped: int = 0
    """Samples that finished epochs left out, as drop_last asks for."""
    different: int
    """Ids that were used at all, where the sampler draws with replacement."""
    epochs: int
    """Finished ones; the last one of a stream counts, since nobody knows its end."""
    samples_an_epoch: int | None
    """None if the finished epochs have different lengths."""
    unfinished: int
    """Samples of the last epoch, if it is not finished."""
    epoch_length: int | None
    """Samples that the last epoch has in all, where known."""
    sampler: str
    repeats: bool
    start: str = ""
    """Where the first run begins, if not at the beginning."""
    problems: list[str] = field(default_factory=list)
    """The first hundred."""
    num_problems: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether every promised sample was used, and none once too often."""
        return not (self.repeated or self.missed or self.num_problems)

    def sentence(self) -> str:
        """All of it in one line: `60000 samples, 0 repeated, 0 missed`."""
        found = f", {self.repeated} repeated, {self.missed} missed"
        if self.repeats:
            found = f" drawn by {self.sampler}, {self.different} different, {self.missed} missed"
        # Zeros alone would sound as if all were well.
        if self.num_problems and not (self.repeated or self.missed):
            found += f", but {counted(self.num_problems, 'problem')}"
        if self.dropped:
            found += f", {self.dropped} left out by drop_last"
        return self._amount() + found + (f" ({self.start})" if self.start else "")

    def _amount(self) -> str:
        if self.epochs == 0:
            of = f"{self.unfinished} of " if self.epoch_length is not None else ""
            return of + counted(self.epoch_length or 0, "sample")
        more = f" and {self.unfinished} of the next" if self.unfinished else ""
        if self.samples_an_epoch is None:
            return f"{self.samples - self.unfinished} samples in {self.epochs} epochs{more}"
        each = counted(self.samples_an_epoch, "sample")
        return each if self.epochs == 1 and not more else f"{each} x {counted(self.epochs, 'epoch')}{more}"

    def counts(self) -> dict[str, int]:
        """The numbers for the summary of a run."""
        return {name: getattr(self, name) for name in ("samples", "repeated", "missed", "redone", "dropped")}

    def to_json(self) -> dict[str, Any]:
        """What `evenstep audit --json` prints."""
        drawn = {"sampler": self.sampler, "repeats": self.repeats}
        if self.repeats:
            drawn["different"] = self.different
        epochs = {"epochs": self.epochs, "unfinished": self.unfinished}
        said = {"sentence": self.sentence(), "problems": self.problems, "num_problems": self.num_problems}
        return {"is_clean": self.is_clean, **self.counts(), **epochs, **drawn, **said}


class Judge:
    """Takes the steps of a chain one after the other; keeps the ids of one epoch."""

    def __init__(self, chain: Sequence[Run]) -> None:
        first = chain[0]
        # The last run of a stream knows the most.
        self.promise = chain[-1].promise
        self.problems = Problems()
        self.step = first.step
        self.position = first.position
        self.samples = self.repeated = self.missed = self.redone = self.dropped = 0
        self.num_finished = 0
        self.lengths: set[int] = set()
        """Of finished epochs, the different ones: of a million epochs too."""
        number, place = self.promise.lengths.locate(first.position)
        self.start = ""
        if first.step:
            where = (
                f"{counted(place, 'sample')} into epoch {number + 1}"
                if place
                else f"the beginning of epoch {number + 1}"
            )
            self.start = f"from step {first.step + 1} on, {where}; the runs before it were not given"
        self._seen = Seen(self.promise.num_samples)
        self.epoch = Epoch(number, place, self.promise, self._seen, self.problems)

    def begin(self, run: Run) -> None:
        """Go on with the next run: it must begin where the effective steps of those before it end."""
        if run.step > self.step:
            self._lost(self.step + 1, run.step)
        elif run.position != self.position and not self.problems.num:
            self.problems.add(
                f"{run.folder} goes on at step {run.step} after {run.position} samples, "
                f"and the steps before it used {self.position}"
            )
        self.step, self.position = run.step, run.position

    def take(self, line: Line, run: Run) -> None:
        """Count one step."""
        self._follow(line.step, run)
        self.position += len(line.ids)
        if line.epoch < self.epoch.number:
            self.problems.add(
                f"step {line.step} of {run.folder} is of epoch {line.epoch + 1}, "
                f"though epoch {self.epoch.number + 1} has begun"
            )
            return
        if line.epoch > self.epoch.number:
            self._next_epoch(line)
        self.samples += len(line.ids)
        self.epoch.take(line)

    def finish(self, last: Run) -> Audit:
        """What all of it shows."""
        if last.last_step is not None and last.last_step > self.step:
            self._lost(self.step + 1, last.last_step)
        unfinished = 0
        if self.epoch.is_finished or (self.epoch.promised is None and self.epoch.num_samples):
            self._close()
        else:
            unfinished = self.epoch.num_samples
            self.repeated += self.epoch.count_repeated()
        return Audit(
            samples=self.samples,
            repeated=self.repeated,
            missed=self.missed,
            redone=self.redone,
            dropped=self.dropped,
            different=self._seen.num if self.promise.repeats else 0,
            epochs=self.num_finished,
            samples_an_epoch=next(iter(self.lengths)) if len(self.lengths) == 1 else None,
            unfinished=unfinished,
            epoch_length=self.promise.lengths.of(self.epoch.number),
            sampler=self.promise.sampler,
            repeats=self.promise.repeats,
            start=self.start,
            problems=self.problems.sentences,
            num_problems=self.problems.num,
        )

    def _follow(self, step: int, run: Run) -> None:
        if step == self.step + 1:
            self.step = step
        elif step > self.step:
            self._lost(self.step + 1, step - 1)
            self.step = step
        elif step == self.step:
            self.problems.add(f"step {step} comes again in {run.folder}")
        else:
            self.problems.add(f"step {step} of {run.folder} comes after step {self.step}")

    def _lost(self, first: int, last: int) -> None:
        self.problems.add(f"step {first} is in no file" if first == last else f"steps {first} to {last} are in no file")

    def _next_epoch(self, line: Line) -> None:
        epoch = self.epoch
        if epoch.promised is not None and epoch.num_samples < epoch.promised:
            self.problems.add(
                f"epoch {line.epoch + 1} begins at step {line.step} though epoch {epoch.number + 1} has had "
                f"{epoch.num_samples} of {epoch.promised}"
            )
        self._close()
        if line.epoch > epoch.number + 1:
            self._skip(epoch.number + 1, line.epoch)
        if not self.promise.repeats:
            self._seen = Seen(self.promise.num_samples)
        self.epoch = Epoch(line.epoch, 0, self.promise, self._seen, self.problems)

    def _skip(self, first: int, stop: int) -> None:
        lengths = self.promise.lengths
        self.missed += lengths.begin(stop) - lengths.begin(first)
        self.problems.add(
            f"epoch {first + 1} is in no file" if stop == first + 1 else f"epochs {first + 1} to {stop} are in no file"
        )

    def _close(self) -> None:
        self.repeated += self.epoch.count_repeated()
        self.missed += self.epoch.count_missed()
        self.dropped += self.promise.dropped.of(self.epoch.number) or 0
        self.num_finished += 1
        self.lengths.add(self.epoch.num_samples)
