"""The runs of one training: what they promise, and where each goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from evenstep.audit.samples import FILE, samples_file, unreadable
from evenstep.errors import BadInput
from evenstep.order import Lengths
from evenstep.record import Drawn, Record


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
