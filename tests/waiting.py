"""Waiting for something that another process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    happened: Callable[[], object], seconds: float = 60, otherwise: Callable[[], str] = lambda: "it did not happen"
) -> None:
    """Check every 20 ms until `happened()` is true; fail after `seconds`, with what `otherwise` says."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"{otherwise()} within {seconds} s"
        time.sleep(0.02)
