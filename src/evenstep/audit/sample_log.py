"""samples.jsonl: the sample ids of each optimizer step, one line per step, written by a run and read by an audit.

A training that was interrupted and resumed is a chain of runs; runs that cannot be one training are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.errors import BadInput
from evenstep.record import Record, SamplingFacts
from evenstep.sampling.order import Lengths
from evenstep.typed_values import MALFORMED, Natural, Positive, Schema

FILE = "samples.jsonl"
MAX_PROBLEMS = 100
"""Sentences that are kept, so that a broken file does not fill the memory."""

Ids = NDArray[np.int64]


def samples_file(run_folder: Path, attempt: int) -> Path:
    """The samples file of a start of a run: samples.jsonl for the first, samples-2.jsonl for the second."""
    return run_folder / (FILE if attempt == 1 else f"{Path(FILE).stem}-{attempt}{Path(FILE).suffix}")


class SamplesWriter:
    """Writes the samples of every finished step; each line is in the file before the next step begins.

    Each start of a run writes a new file, which its row in the Record names.
    """

    def __init__(self, run_folder: Path) -> None:
        for attempt in count(1):
            with suppress(FileExistsError):
                self.path = samples_file(run_folder, attempt)
                self._file = self.path.open("x", encoding="utf-8")
                return

    def append(self, epoch: int, step: int, ids: Sequence[int] | Ids) -> None:
        """Add one step: the samples of all ranks, in the order of the global batch."""
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else list(map(int, ids))
        line = json.dumps({"epoch": epoch, "step": step, "ids": numbers}, separators=(",", ":"))
        self._file.write(line + "\n")
        # Now: an audit must know what was trained before a kill -9.
        self._file.flush()

    def close(self) -> None:
        """Close the file; a line that could not be written has raised its error already."""
        with suppress(OSError):
            self._file.close()


@dataclass(frozen=True)
class SampleLine:
    epoch: Natural
    step: Positive
    ids: list[Any]
    """Integers, unless the file is damaged."""


_LINE: Schema[SampleLine] = Schema(SampleLine, "line of samples")


class Problems:
    """The first problems of an audit, as sentences, and the number of all."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.num = 0

    def add(self, sentence: str) -> None:
        self.num += 1
        if self.num <= MAX_PROBLEMS:
            self.sentences.append(sentence)


def read_lines(path: Path, problems: Problems) -> Iterator[SampleLine]:
    """The steps of a file. A last line that is cut off is ignored: its step was never checkpointed."""
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    return
                try:
                    line = _LINE.decode(text)
                except MALFORMED:
                    problems.add(f"line {number} of {path} is not the samples of a step")
                else:
                    yield line
    except OSError as error:
        raise unreadable(path, error) from error


@dataclass(frozen=True)
class Expected:
    """What the samples of each epoch should be; the same in all runs of a chain."""

    sampler: str
    repeats: bool
    num_samples: int | None
    lengths: Lengths
    dropped: Lengths
    """Samples that drop_last leaves out of each epoch; they are not in `lengths`."""
    seed: int

    @property
    def is_stream(self) -> bool:
        """Whether the data is an iterable dataset, whose ids count its samples: 0, 1, 2 and so on."""
        return self.num_samples is None

    def difference(self, later: Expected) -> str | None:
        """Why a run that expects `later` cannot continue one that expects this; None if it can."""
        for name in ("sampler", "repeats", "num_samples", "seed"):
            one, other = getattr(self, name), getattr(later, name)
            if one != other:
                return f"{name.replace('_', ' ')} is {one} in one and {other} in the other"
        # The length of a stream's epoch is known once the epoch has ended.
        known = len(self.lengths.first) if self.lengths.rest is None else None
        if self.lengths != Lengths(later.lengths.rest, later.lengths.first[:known]):
            return "their epochs have different lengths"
        return None


@dataclass(frozen=True)
class RunPart:
    """One start of a run: the first one in its folder, or a restart; and the position from which it continues."""

    folder: Path
    file: Path
    expected: Expected
    step: int
    position: int
    last_step: int | None
    """None if it was interrupted."""
    resumed_from: str | None
    """The name of the run whose checkpoint it loaded."""
    lost_files: tuple[Path, ...] = ()
    """Sample files of starts that were lost entirely: a later one continued from before their first step."""


def read_chain(runs: Sequence[str | Path]) -> list[RunPart]:
    """The parts of a training in the order of their first steps; parts with the same first step in the order given."""
    if not runs:
        raise BadInput("no run given; evenstep audit takes the folders of one or more runs")
    folders = {path.resolve(): path for path in map(_folder, runs)}
    chain = sorted((run for folder in folders.values() for run in _read(folder)), key=lambda run: run.step)
    for one, other in pairwise(chain):
        if one.folder == other.folder:
            continue
        difference = one.expected.difference(other.expected) or _no_descent(one, other, chain)
        if difference:
            raise BadInput(
                f"{one.folder} and {other.folder} are not parts of one training run: {difference}.\n"
                "Give a run together with those that were resumed from it, or one run alone"
            )
    return chain


def _no_descent(one: RunPart, other: RunPart, chain: Sequence[RunPart]) -> str | None:
    """Why a run cannot continue the runs before it, or replace one that was interrupted; None if it can."""
    if one.last_step is not None and other.step < one.last_step:
        return f"the first one ended at step {one.last_step}, and the other one begins at step {other.step}"
    earlier = {run.folder.resolve().name for run in chain if run is not other}
    if other.step and other.resumed_from is not None and other.resumed_from not in earlier:
        return f"the other one was resumed from {other.resumed_from}, which was not given"
    return None


def _folder(run: str | Path) -> Path:
    """The run folder, given itself or as one of its files."""
    return Path(run).parent if os.path.isfile(run) else Path(run)


def _read(folder: Path) -> list[RunPart]:
    try:
        # Without the steps: a long run has too many to hold in memory.
        record = Record.read(folder, kinds=("summary",))
        if not os.path.isfile(folder / FILE):
            raise BadInput(f"{folder} has no {FILE}; train it with --audit")
    except OSError as error:
        raise unreadable(folder, error) from error
    try:
        return _parts(folder, record)
    except KeyError as error:
        raise BadInput(
            f"the record of {folder} does not describe how its samples are drawn (it lacks {error}); "
            "another version of evenstep wrote it"
        ) from error


def _parts(folder: Path, record: Record) -> list[RunPart]:
    """One part for each start of the run in this folder, without those that were lost entirely."""
    runs: list[RunPart] = []
    for attempt, data in enumerate([record.data, *record.restarts], 1):
        # Older Records do not name the file; each start then has a numbered one.
        name = data.get("samples_file", samples_file(folder, attempt).name)
        run = _part(folder, folder / Path(name).name, record, data)
        lost = [earlier for earlier in runs if earlier.step >= run.step and attempt > 1]
        runs = [earlier for earlier in runs if earlier not in lost]
        files = tuple(file for one in lost for file in (*one.lost_files, one.file) if file.exists())
        runs.append(replace(run, lost_files=files))
    # Only the last start can have finished.
    return [*(replace(run, last_step=None) for run in runs[:-1]), runs[-1]]


def _part(folder: Path, file: Path, record: Record, data: SamplingFacts) -> RunPart:
    lengths = Lengths(data["rest"], tuple(data["first"]))
    *first, rest = data.get("dropped") or [0]
    dropped = Lengths(rest, tuple(first))
    expected = Expected(data["sampler"], data["repeats"], data["num_samples"], lengths, dropped, record.plan.seed)
    last_step = None if record.summary is None else record.data["step"] + record.summary.steps
    # runs/NAME/checkpoints/step-...
    parents = Path(record.plan.resume or "").parents
    resumed_from = parents[1].name if record.plan.resume and len(parents) > 1 else None
    return RunPart(folder, file, expected, data["step"], data["position"], last_step, resumed_from)


def unreadable(path: Path, error: OSError) -> BadInput:
    """The error for a file that exists and cannot be read."""
    return BadInput(f"{path} cannot be read: {error.strerror or error}")


def counted(num: int, thing: str) -> str:
    return f"{num:,} {thing}" if num == 1 else f"{num:,} {thing}s"
