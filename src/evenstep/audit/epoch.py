"""The ids of one epoch: which came again, which did not come, which are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from evenstep.audit.chain import Promise
from evenstep.audit.samples import Ids, Line, Problems, counted

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
