"""The Record, read while another process writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from evenstep.record import Record, rows
from evenstep.worker.job import Event


class RecordTail:
    """The new rows of a record file that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._record: Record | None = None
        # Rows of an attempt before this one were shown then; a row that it left half written will be cut off.
        self._at = path.read_bytes().rfind(b"\n") + 1 if path.is_file() else 0

    def new(self) -> Iterator[Event]:
        """Rows that were written since the last call."""
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
            self._file.seek(self._at)
        for row in rows(self._file) if self._file is not None else ():
            if self._record is None:
                self._record = Record.begin(row)
                continue
            event = self._record.take(row)
            # What was told need not be kept.
            self._record.steps.clear()
            if event is not None:
                yield event

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
