"""The traces of all ranks, merged at the end of the training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evenstep.errors import EvenstepError
from evenstep.report import trace
from evenstep.report.lanes import RankTrace, merge
from evenstep.schema import Natural, Schema
from evenstep.worker.job import Event
from evenstep.worker.tracing import ALL, FOLDER


@dataclass(frozen=True)
class _OfRank:
    file: str
    machine: str


@dataclass(frozen=True)
class _Traced:
    """What the ranks have left."""

    steps: tuple[Natural, Natural]
    ranks: dict[Natural, _OfRank]


_TRACED: Schema[_Traced] = Schema(_Traced, "list of traces")


def with_trace(events: Iterator[Event], folder: Path) -> Iterator[Event]:
    """What happens, and at the end, good or bad, where the trace is and what a step was made of."""
    try:
        yield from events
    except Exception:
        # Not during the training: whoever merges does not watch.
        yield from merged(folder)
        raise
    yield from merged(folder)


def merged(folder: Path) -> list[str]:
    """Make one timeline of those of the ranks, if they are there; what there is to say about it.

    A training never fails of this.
    """
    if not (folder / FOLDER / ALL).exists():
        return []
    try:
        known = _TRACED.read(folder / FOLDER / ALL)
        ranks = [RankTrace(rank, folder / FOLDER / one.file, one.machine) for rank, one in known.ranks.items()]
        path = folder / trace.FILE
        merge(ranks, path)
        found = trace.numbers(path)
        trace.write_numbers(found, folder / FOLDER / trace.NUMBERS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EvenstepError) as error:
        return [f"warning: no trace was made ({type(error).__name__}: {error})"]
    first, last = known.steps
    where = f"trace of steps {first} to {last}: {path}; open it at https://ui.perfetto.dev or in chrome://tracing"
    return [where, *trace.lines(found)]
