"""The file of samples: one line for each optimizer step, written while a run trains and read afterwards."""

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
MOST_PROBLEMS = 100
"""Sentences that are kept; a file that is all wrong would fill the memory."""

Ids = NDArray[np.int64]


def samples_file(run_folder: Path, attempt: int) -> Path:
    """The file of samples of the first start of a run, or of a later one, beside it."""
    return run_folder / (FILE if attempt == 1 else f"{Path(FILE).stem}-{attempt}{Path(FILE).suffix}")


class SamplesWriter:
    """Writes the samples of every finished step; each line is in the file before the next step begins.

    Every start of a run has a file of its own, the first one that is free; its row in the Record names it.
    """

    def __init__(self, run_folder: Path) -> None:
        for attempt in count(1):
            with suppress(FileExistsError):
                self.path = samples_file(run_folder, attempt)
                self._file = self.path.open("x", encoding="utf-8")
                return

    def append(self, epoch: int, step: int, ids: Sequence[int] | Ids) -> None:
        """Add one step: its samples in global order, not in that of one rank."""
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else list(map(int, ids))
        line = json.dumps({"epoch": epoch, "step": step, "ids": numbers}, separators=(",", ":"))
        self._file.write(line + "\n")
        # At once: what was trained before a kill -9 must be known after it.
        self._file.flush()

    def close(self) -> None:
        """Nothing is left to write, but for a line that could not be: that error was raised then."""
        with suppress(OSError):
            self._file.close()


@dataclass(frozen=True)
class Line:
    """One step."""

    epoch: Natural
    step: Positive
    ids: list[Any]
    """Whole numbers, if all is well."""


_LINE: Schema[Line] = Schema(Line, "line of samples")


class Problems:
    """What is wrong, in sentences: the first ones, and how many there were."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.num = 0

    def add(self, sentence: str) -> None:
        """One more."""
        self.num += 1
        if self.num <= MOST_PROBLEMS:
            self.sentences.append(sentence)


def read_lines(path: Path, problems: Problems) -> Iterator[Line]:
    """The steps of a file; the last one, if torn, is of a step that nobody can go on from."""
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
    """A file that is there and cannot be opened."""
    return BadInput(f"{path} cannot be read: {error.strerror or error}")


def counted(num: int, thing: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{num} {thing}" if num == 1 else f"{num} {thing}s"
