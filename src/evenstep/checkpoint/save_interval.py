"""How often a run that can be restarted saves a checkpoint by the clock."""

from __future__ import annotations

import time

SAVE_SECONDS = 30.0
"""The most that a crash costs."""
SAVE_INTERVAL_FACTOR = 50
"""A save is not repeated within this many times its duration."""


class SaveInterval:
    """When the next checkpoint is due. One rank's clock counts for all."""

    def __init__(self) -> None:
        self._next_save = time.monotonic() + SAVE_SECONDS

    def is_due(self) -> bool:
        return time.monotonic() > self._next_save

    def saved(self, seconds: float) -> None:
        """Note that a checkpoint was written, and its duration."""
        self._next_save = time.monotonic() + max(SAVE_SECONDS, SAVE_INTERVAL_FACTOR * seconds)
