"""A trial that failed, and the search for what helps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from evenstep.doctor.trying import Ended, Settings

TRYING_SECONDS = 25.0
"""For all remedies of all pairs together."""
VISIT_SECONDS = 50.0
"""For all that is tried: the whole visit is to take about a minute, however much of it hangs."""
LEAST_SECONDS = 6.0
"""Ranks take some seconds to start: with less than this, a sound pair would be said to hang."""


@dataclass(frozen=True)
class Trial:
    """What came of a pair, and of the remedies that were tried on it."""

    name: str
    ended: Ended
    helped_by: Settings | None = None
    healed: Ended | None = None
    """What came of it with the remedy that helped."""
    tried: tuple[Settings, ...] = ()
    not_tried: tuple[Settings, ...] = ()
    is_left_out: bool = False
    """Whether no time was left to try it at all."""


@dataclass
class Patience:
    """The time that may still be spent over all trials: on remedies, and on anything."""

    seconds: float = TRYING_SECONDS
    deadline: float = field(default_factory=lambda: time.monotonic() + VISIT_SECONDS)

    def allowed(self, seconds: float) -> float:
        """So many seconds, or as many as are left; 0 if these are too few to try anything."""
        left = self.deadline - time.monotonic()
        return min(seconds, left) if left >= LEAST_SECONDS else 0.0

    def spend(self, attempt: Callable[[Settings], Ended], settings: Settings) -> Ended:
        """Make an attempt, and remember how long it took."""
        began = time.monotonic()
        try:
            return attempt(settings)
        finally:
            self.seconds -= time.monotonic() - began


def search(
    failed: Trial, to_try: Sequence[Settings], attempt: Callable[[Settings], Ended], patience: Patience
) -> Trial:
    """Try one remedy after the other, until one helps or no time is left."""
    for number, settings in enumerate(to_try):
        if patience.allowed(patience.seconds) <= 0:
            return replace(failed, tried=tuple(to_try[:number]), not_tried=tuple(to_try[number:]))
        again = patience.spend(attempt, settings)
        if is_sound(again):
            return replace(failed, helped_by=settings, healed=again, tried=tuple(to_try[: number + 1]))
    return replace(failed, tried=tuple(to_try))


def is_sound(ended: Ended) -> bool:
    """Whether it ran to its end with every sum right."""
    return ended.is_well and wrong_bytes(ended) is None


def wrong_bytes(ended: Ended) -> int | None:
    """The smallest tensor, in bytes, whose sum was wrong on any rank."""
    wrong = [int(row["num_bytes"]) for one in ended.returned for row in one["rows"] if not row["is_right"]]
    return min(wrong, default=None)
