"""The Record, read while another process writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from evenstep.record import Start, end_of_rows, rows
from evenstep.worker.job import Event


class RecordTail:
    """The new rows of a record file that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._at = 0
        if path.is_file():
            with path.open("rb") as file:
                # Rows of an attempt before this one were shown then; one that it left half written will be cut off.
                self._at = end_of_rows(file)

    def new(self) -> Iterator[Event]:
        """Rows that were written since the last call."""
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
            self._file.seek(self._at)
        for row in rows(self._file) if self._file is not None else ():
            if not isinstance(row, Start):
                yield row

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
