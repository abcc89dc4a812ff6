"""Requests to a running training: to stop and save, or only to save. All ranks agree on them at the same step.

A signal may reach one rank, or all of them at slightly different times. The request is sent along with the sum of the
losses, which is all-reduced at every step anyway; so all ranks see it at the same step, without another collective.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from evenstep.distributed.worker_process import unblock_signals

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that a cluster sends to a job before it ends it."""
_STOP = 4096.0
"""More than there are ranks, so that both requests fit into one summed number."""


def is_ignored(number: int) -> bool:
    """Whether a signal is ignored: SIGHUP under `nohup`, SIGINT of a background job."""
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
    """Handle signals from the start of the process; a request before the training begins is remembered."""

    def take(number: int, frame: FrameType | None) -> None:
        global _stop_requested_early
        _stop_requested_early = True

    for number in SIGNALS:
        signal.signal(number, take)
    unblock_signals()


class Requests:
    """This process's requests, and what all processes have agreed on."""

    def __init__(self) -> None:
        self.stop_requested = _stop_requested_early
        self.is_interrupt = False
        """Whether it was Ctrl-C, not a cluster."""
        self.stop = False
        self.save = False
        self.save_is_due: Callable[[], bool] | None = None
        """Whether this process requests a checkpoint now."""

    def encode(self) -> float:
        """This process's requests as a number that can be summed over processes."""
        wants_save = self.save_is_due is not None and self.save_is_due()
        return _STOP * self.stop_requested + wants_save

    def agree(self, total: float) -> None:
        """Decode the sum of all processes' requests."""
        self.agreed = total >= _STOP, total % _STOP > 0

    @property
    def agreed(self) -> tuple[bool, bool]:
        """Whether to stop, and whether to save."""
        return self.stop, self.save

    @agreed.setter
    def agreed(self, values: tuple[bool, bool]) -> None:
        self.stop, self.save = values

    def listening(self, *numbers: signal.Signals) -> AbstractContextManager[None]:
        """Handle these signals as a request to stop; a second Ctrl-C stops at once."""
        return handling_signals(self._take, numbers)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.is_interrupt = True
            print("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once", file=sys.stderr)
        self.stop_requested = True
