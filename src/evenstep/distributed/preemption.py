"""What a running training is asked to do: to stop and save, or only to save. Ranks agree on it at a step.

A signal reaches one rank, or all of them a moment apart. What it asks for travels with the sum of the losses, which
goes around at every step anyway; so every rank learns of it at the same step, and no collective is added.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from evenstep.distributed.process import unblock_signals

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What a cluster sends to a job that it is about to take away."""
_STOP = 4096.0
"""More than there are ranks, so that both wishes fit into one number that is summed."""
SAVE_SECONDS = 30.0
SAVE_INTERVAL_FACTOR = 50
"""A save that took a second is not repeated within so many."""


def is_ignored(number: int) -> bool:
    """Whether a signal is to be left alone, as `nohup` asks with SIGHUP, and a shell with Ctrl-C behind its back."""
    return signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def handling_signals(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]
) -> Iterator[None]:
    """Install `handler` for these signals inside the block; in a thread other than the main one, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers if not is_ignored(number)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


_stop_requested_early = False


def catch_early_signals() -> None:
    """Take signals from the first moment on; what was asked before there was a training is not forgotten."""

    def take(number: int, frame: FrameType | None) -> None:
        global _stop_requested_early
        _stop_requested_early = True

    for number in SIGNALS:
        signal.signal(number, take)
    unblock_signals()


class Requests:
    """This process's wishes, and what all processes have agreed on."""

    def __init__(self) -> None:
        self.stop_requested = _stop_requested_early
        self.is_interrupt = False
        """Whether it was Ctrl-C, and not a cluster."""
        self.stop = False
        self.save = False
        self._saves_periodically = False
        self._next_save = 0.0

    def save_periodically(self) -> None:
        """Ask for a checkpoint every half minute: what a crash costs. One rank's clock counts for all."""
        self._saves_periodically = True
        self._next_save = time.monotonic() + SAVE_SECONDS

    def saved(self, seconds: float) -> None:
        """A checkpoint was written, and took so long."""
        self._next_save = time.monotonic() + max(SAVE_SECONDS, SAVE_INTERVAL_FACTOR * seconds)

    def encode(self) -> float:
        """What this process wants, as a number that can be summed over processes."""
        wants_save = self._saves_periodically and time.monotonic() > self._next_save
        return _STOP * self.stop_requested + wants_save

    def agree(self, total: float) -> None:
        """Take the sum of all wishes."""
        self.stop = total >= _STOP
        self.save = total % _STOP > 0

    def listening(self, *numbers: signal.Signals) -> AbstractContextManager[None]:
        """Take these signals as a wish to stop; a second Ctrl-C is not waited with."""
        return handling_signals(self._take, numbers)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.is_interrupt = True
            print("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once", file=sys.stderr)
        self.stop_requested = True
