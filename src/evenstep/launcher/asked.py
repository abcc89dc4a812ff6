"""Signals that ask the launcher to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from evenstep.worker.requests import is_ignored


class Heeded(Exception):
    """A signal came while there was nothing to finish."""


class Asked:
    """Signals that ask the launcher to stop; a second one is not waited with."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._is_idle = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take them, for as long as a run goes on."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        before = {number: signal.signal(number, self._take) for number in numbers if not is_ignored(number)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

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
