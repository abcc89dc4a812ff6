"""The runs that form one training: where each begins, and what its samples should be.

A training that was interrupted and resumed is a chain of runs. Runs that cannot be one training are refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from evenstep.audit.sample_log import FILE, samples_file, unreadable
from evenstep.errors import BadInput
from evenstep.record import Record, SamplingFacts
from evenstep.sampling.order import Lengths


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
                f"{one.folder} and {other.folder} are not parts of one training: {difference}.\n"
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
            f"the record of {folder} does not say how its samples are drawn (it lacks {error}); "
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
