"""The verdict on a chain of runs, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from evenstep.audit.chain import Run
from evenstep.audit.epoch import Epoch, Seen
from evenstep.audit.samples import Line, Problems, counted


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
