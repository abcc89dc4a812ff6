"""Counts the samples of a training, step by step: which were repeated, which were missed, which should not exist."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.audit.sample_log import Expected, Ids, Problems, RunPart, SampleLine, counted

NUM_COUNTED = 1 << 32
"""Ids that an audit counts, from 0 up: 4 GiB, at one byte for each."""
_NOT_COUNTED = f"not counted: an audit counts ids below {NUM_COUNTED:,}"
_NUM_EXAMPLES = 3
_IDS_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit of one run, or of a chain of runs."""

    samples: int
    """Samples of all epochs, with repeated ones and without lost work."""
    repeated: int
    """Samples that had already been used in their epoch; 0 if the sampler draws with replacement."""
    missed: int
    """Samples that finished epochs should have used and did not."""
    redone: int
    """Samples of steps that were lost in a crash and repeated by the next run."""
    dropped: int = 0
    """Samples that finished epochs left out because of drop_last."""
    different: int
    """Distinct ids, where the sampler draws with replacement."""
    epochs: int
    """Finished epochs; the last epoch of a stream counts, since its length is unknown."""
    samples_an_epoch: int | None
    """None if the finished epochs have different lengths."""
    unfinished: int
    """Samples of the last epoch, if it has not finished."""
    epoch_length: int | None
    """The full length of the last epoch, where known."""
    sampler: str
    repeats: bool
    start: str = ""
    """Where the first run begins, if it was resumed."""
    problems: list[str] = field(default_factory=list)
    """The first hundred."""
    num_problems: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether every expected sample was used, and none too often."""
        return not (self.repeated or self.missed or self.num_problems)

    def sentence(self) -> str:
        """The result in one line: `60000 samples, 0 repeated, 0 missed`."""
        found = f", {self.repeated:,} repeated, {self.missed:,} missed"
        if self.repeats:
            found = f" drawn by {self.sampler}, {self.different:,} different, {self.missed:,} missed"
        # Zeros alone would read as if nothing were wrong.
        if self.num_problems and not (self.repeated or self.missed):
            found += f", but {counted(self.num_problems, 'problem')}"
        if self.dropped:
            found += f", {self.dropped:,} left out by drop_last"
        return self._amount() + found + (f" ({self.start})" if self.start else "")

    def _amount(self) -> str:
        if self.epochs == 0:
            of = f"{self.unfinished:,} of " if self.epoch_length is not None else ""
            return of + counted(self.epoch_length or 0, "sample")
        more = f" and {self.unfinished:,} of the next" if self.unfinished else ""
        if self.samples_an_epoch is None:
            return f"{self.samples - self.unfinished:,} samples in {self.epochs:,} epochs{more}"
        each = counted(self.samples_an_epoch, "sample")
        return each if self.epochs == 1 and not more else f"{each} x {counted(self.epochs, 'epoch')}{more}"

    def counts(self) -> dict[str, int]:
        """The numbers for the summary of a run."""
        return {name: getattr(self, name) for name in ("samples", "repeated", "missed", "redone", "dropped")}

    def to_json(self) -> dict[str, Any]:
        drawn = {"sampler": self.sampler, "repeats": self.repeats}
        if self.repeats:
            drawn["different"] = self.different
        epochs = {"epochs": self.epochs, "unfinished": self.unfinished}
        summary = {"sentence": self.sentence(), "problems": self.problems, "num_problems": self.num_problems}
        return {"is_clean": self.is_clean, **self.counts(), **epochs, **drawn, **summary}


def _command_with_earlier(first: RunPart) -> str:
    """The command that counts the run before this one too, if it is there."""
    earlier = first.folder.parent / (first.resumed_from or "")
    if first.resumed_from is None or not earlier.is_dir():
        return ""
    return f"; with the runs before it: evenstep audit {shlex.join([str(earlier), str(first.folder)])}"


class Judge:
    """Counts the steps of a chain in order; holds the ids of one epoch."""

    def __init__(self, chain: Sequence[RunPart]) -> None:
        first = chain[0]
        # The last run knows the lengths of most epochs of a stream.
        self.expected = chain[-1].expected
        self.problems = Problems()
        self.step = first.step
        self.position = first.position
        self.samples = self.repeated = self.missed = self.redone = self.dropped = 0
        self.num_finished = 0
        self.lengths: set[int] = set()
        """The distinct lengths of finished epochs."""
        number, offset = self.expected.lengths.locate(first.position)
        self.start = ""
        if first.step:
            where = f"{counted(offset, 'sample')} into" if offset else "the beginning of"
            self.start = f"counted from step {first.step + 1} on, {where} epoch {number + 1}"
            self.start += _command_with_earlier(first)
        self._seen = SeenIds(self.expected.num_samples)
        self.epoch = Epoch(number, offset, self.expected, self._seen, self.problems)

    def begin(self, run: RunPart) -> None:
        """Start the next run, which must begin where the steps before it end."""
        if run.step > self.step:
            self._lost(self.step + 1, run.step)
        elif run.position != self.position and not self.problems.num:
            self.problems.add(
                f"{run.folder} continues at step {run.step} after {run.position} samples, "
                f"and the steps before it used {self.position}"
            )
        self.step, self.position = run.step, run.position

    def add(self, line: SampleLine, run: RunPart) -> None:
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
        self.epoch.add(line)

    def finish(self, last: RunPart) -> Audit:
        if last.last_step is not None and last.last_step > self.step:
            self._lost(self.step + 1, last.last_step)
        unfinished = 0
        if self.epoch.is_finished or (self.epoch.num_expected is None and self.epoch.num_samples):
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
            different=self._seen.num if self.expected.repeats else 0,
            epochs=self.num_finished,
            samples_an_epoch=next(iter(self.lengths)) if len(self.lengths) == 1 else None,
            unfinished=unfinished,
            epoch_length=self.expected.lengths.of(self.epoch.number),
            sampler=self.expected.sampler,
            repeats=self.expected.repeats,
            start=self.start,
            problems=self.problems.sentences,
            num_problems=self.problems.num,
        )

    def _follow(self, step: int, run: RunPart) -> None:
        if step == self.step + 1:
            self.step = step
        elif step > self.step:
            self._lost(self.step + 1, step - 1)
            self.step = step
        elif step == self.step:
            self.problems.add(f"step {step} comes again in {run.folder}")
        else:
            self.problems.add(f"step {step} of {run.folder} comes after step {self.step}")

    def _lost(self, first: int, last: int, what: str = "step") -> None:
        are = f"{what} {first} is" if first == last else f"{what}s {first} to {last} are"
        self.problems.add(f"{are} in no file")

    def _next_epoch(self, line: SampleLine) -> None:
        epoch = self.epoch
        if epoch.num_expected is not None and epoch.num_samples < epoch.num_expected:
            self.problems.add(
                f"epoch {line.epoch + 1} begins at step {line.step} though epoch {epoch.number + 1} has had "
                f"{epoch.num_samples} of {epoch.num_expected}"
            )
        self._close()
        if line.epoch > epoch.number + 1:
            lengths = self.expected.lengths
            self.missed += lengths.begin(line.epoch) - lengths.begin(epoch.number + 1)
            self._lost(epoch.number + 2, line.epoch, "epoch")
        if not self.expected.repeats:
            self._seen = SeenIds(self.expected.num_samples)
        self.epoch = Epoch(line.epoch, 0, self.expected, self._seen, self.problems)

    def _close(self) -> None:
        self.repeated += self.epoch.count_repeated()
        self.missed += self.epoch.count_missed()
        self.dropped += self.expected.dropped.of(self.epoch.number) or 0
        self.num_finished += 1
        self.lengths.add(self.epoch.num_samples)


class Epoch:
    """The ids of one epoch, from position `start` of it."""

    def __init__(self, number: int, start: int, expected: Expected, seen: SeenIds, problems: Problems) -> None:
        length = expected.lengths.of(number)
        self.number = number
        self.start = start
        self.num_expected = None if length is None else length - start
        self.num_samples = 0
        self._expected = expected
        self._seen = seen
        self._problems = problems
        self._num_repeated = 0
        self._examples: list[str] = []
        self._ids: list[int] = []
        self._steps: list[int] = []

    @property
    def is_finished(self) -> bool:
        """Whether it has had all of its samples; False where their number is unknown."""
        return self.num_expected is not None and self.num_samples >= self.num_expected

    def add(self, line: SampleLine) -> None:
        ids = line.ids
        self.num_samples += len(ids)
        if not set(map(type, ids)) <= {int}:
            odd = next(id_ for id_ in ids if type(id_) is not int)
            self._problems.add(f"step {line.step} has {json.dumps(odd)[:40]} for an id; ids are integers")
            ids = [id_ for id_ in ids if type(id_) is int]
        self._ids += ids
        self._steps += [line.step] * len(ids)
        if len(self._ids) >= _IDS_AT_ONCE:
            self._count()

    def count_repeated(self) -> int:
        """Samples that were used again, though the sampler does not draw with replacement."""
        self._count()
        if self._num_repeated:
            examples = ", ".join(self._examples) + ", ..." * (self._num_repeated > len(self._examples))
            self._problems.add(f"epoch {self.number + 1} repeated {counted(self._num_repeated, 'sample')}: {examples}")
        return self._num_repeated

    def count_missed(self) -> int:
        """Samples that this epoch, which has ended, did not use."""
        self._count()
        used = self.num_samples if self._expected.repeats else self._seen.num
        expected = self.num_expected
        if expected is None:
            # Of a stream, everything up to the highest id.
            is_counted = self._expected.is_stream and not self._expected.repeats and used > 0
            expected = self._seen.highest + 1 - self.start if is_counted else used
        if used > expected:
            self._problems.add(f"epoch {self.number + 1} used {used} samples and should use {expected}")
        elif used < expected:
            missed = f"epoch {self.number + 1} missed {expected - used} of {counted(expected, 'sample')}"
            self._problems.add(missed + self._missed_ids(expected, expected - used))
        return max(0, expected - used)

    def _missed_ids(self, expected: int, num_missed: int) -> str:
        """The first missed ids, where the epoch should have used every id."""
        has_all = self._expected.is_stream or expected == self._expected.num_samples
        if self._expected.repeats or not has_all:
            return ""
        ids = self._seen.missing(self.start, self.start + expected)
        return f": ids {', '.join(map(str, ids))}" + ", ..." * (num_missed > len(ids))

    def _count(self) -> None:
        """Count the ids that were added since the last call: together, since a NumPy call costs more than an id."""
        try:
            ids = np.array(self._ids, dtype=np.int64)
        except OverflowError:
            ids = np.array(self._ids, dtype=object)
        lowest, stop = self._bounds()
        is_outside = ((ids < lowest) | (ids >= stop)).astype(bool)
        for index in np.flatnonzero(is_outside)[:_NUM_EXAMPLES]:
            self._problems.add(f"id {ids[index]} of step {self._steps[index]} is {self._outside(int(ids[index]))}")
        indices = np.flatnonzero(~is_outside)
        is_again = self._seen.add(ids[indices].astype(np.int64))
        if not self._expected.repeats:
            self._num_repeated += int(np.count_nonzero(is_again))
            for index in indices[is_again][: _NUM_EXAMPLES - len(self._examples)]:
                self._examples.append(f"id {ids[index]} again in step {self._steps[index]}")
        self._ids, self._steps = [], []

    def _bounds(self) -> tuple[int, int]:
        """The ids that are counted: the first one, and the end."""
        if not self._expected.is_stream:
            return 0, min(self._expected.num_samples or 0, NUM_COUNTED)
        end = NUM_COUNTED if self.num_expected is None else self.start + self.num_expected
        return self.start, min(end, NUM_COUNTED)

    def _outside(self, id_: int) -> str:
        if not self._expected.is_stream:
            if NUM_COUNTED <= id_ < (self._expected.num_samples or 0):
                return _NOT_COUNTED
            return f"outside the data ({self._expected.num_samples:,} samples)"
        if self.num_expected is None:
            return _NOT_COUNTED if id_ >= NUM_COUNTED else f"outside this part of the stream (from {self.start} on)"
        return f"outside this part of the stream ({self.start} to {self.start + self.num_expected - 1})"


class SeenIds:
    """The ids that have been used: one byte for each id up to the highest one."""

    def __init__(self, num_samples: int | None) -> None:
        # NumPy's zeros take memory only where they are written to.
        self._is_seen = np.zeros(min(num_samples or _IDS_AT_ONCE, NUM_COUNTED), dtype=np.bool_)
        self.num = 0
        self.highest = -1

    def add(self, ids: Ids) -> NDArray[np.bool_]:
        """Add ids; True for each that had been added before, or comes earlier in `ids`."""
        is_again = np.ones(len(ids), dtype=np.bool_)
        if not len(ids):
            return is_again
        self.highest = max(self.highest, int(ids.max()))
        if self.highest >= len(self._is_seen):
            grown = np.zeros(min(2 * self.highest + 1, NUM_COUNTED), dtype=np.bool_)
            grown[: len(self._is_seen)] = self._is_seen
            self._is_seen = grown
        distinct, first = np.unique(ids, return_index=True)
        is_again[first] = self._is_seen[distinct]
        self._is_seen[distinct] = True
        self.num += len(ids) - int(np.count_nonzero(is_again))
        return is_again

    def missing(self, start: int, stop: int) -> list[int]:
        """The first few ids from `start` to `stop` that have not been added."""
        found: list[int] = []
        while len(found) < _NUM_EXAMPLES and start < stop:
            rest = self._is_seen[start:stop]
            # Of booleans, argmin is the first False; ids beyond the array have not been added.
            start += len(rest) if rest.all() else int(rest.argmin())
            if start < stop:
                found.append(start)
            start += 1
        return found
