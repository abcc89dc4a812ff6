"""Signals that ask the launcher to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from evenstep.worker.requests import SIGNALS, taken_by


class Heeded(Exception):
    """A signal came while there was nothing to finish."""


class Asked:
    """Signals that ask the launcher to stop; a second one is not waited with."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._is_idle = False

    def listening(self) -> AbstractContextManager[None]:
        """Take them, for as long as a run goes on."""
        return taken_by(self._take, (signal.SIGINT, *SIGNALS))

    def _take(self, number: int, frame: FrameType | None) -> None:
        # Not so a second SIGTERM: Slurm sends two of them within a tenth of a second.
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self._is_idle:
            raise Heeded

    @contextmanager
    def heeded_at_once(self) -> Iterator[None]:
        """Raise Heeded when a signal comes, or has come."""
        self._is_idle = True
        try:
            if self.number is not None:
                raise Heeded
            yield
        finally:
            self._is_idle = False
