"""samples.jsonl: the sample ids of each optimizer step, one line per step, written by a run and read by an audit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.errors import BadInput
from evenstep.schema import MALFORMED, Natural, Positive, Schema

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
    """The samples of one step."""

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
        """Add a problem."""
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


def unreadable(path: Path, error: OSError) -> BadInput:
    """The error for a file that exists and cannot be read."""
    return BadInput(f"{path} cannot be read: {error.strerror or error}")


def counted(num: int, thing: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{num} {thing}" if num == 1 else f"{num} {thing}s"
