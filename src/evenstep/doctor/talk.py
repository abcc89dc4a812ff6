"""What the doctors of several machines tell each other, through a store that one of them holds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

POLL_SECONDS = 0.005
ANSWER_SECONDS = 120.0


class Board(Protocol):
    """Where texts are left for others: a store of torch's."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class Talk:
    """This machine among all of them."""

    board: Board
    machine: int
    num: int
    is_lost: Callable[[], bool] = lambda: False
    """Whether a machine is known to be gone, so that nobody need be waited for."""

    def tell(self, key: str, values: Mapping[str, Any]) -> None:
        """Leave plain values for whoever asks for them."""
        self.board.set(f"doctor/{key}", json.dumps(values))

    def hear(self, key: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any] | None:
        """What was left there; None if nothing comes. Not by waiting in the store: that would never end."""
        deadline = time.monotonic() + seconds
        while not self.board.check([f"doctor/{key}"]):
            if time.monotonic() > deadline or self.is_lost():
                return None
            time.sleep(POLL_SECONDS)
        values = json.loads(self.board.get(f"doctor/{key}"))
        return values if isinstance(values, dict) else None

    def seconds_behind(self) -> float | None:
        """How far this machine's clock is behind the first one's; each is answered in turn."""
        if self.machine:
            return self._ask_clock()
        for machine in range(1, self.num):
            if self.hear(f"clock/{machine}/asked") is not None:
                self.tell(f"clock/{machine}/answered", {"seconds": time.time()})
        return 0.0

    def _ask_clock(self) -> float | None:
        asked = time.time()
        self.tell(f"clock/{self.machine}/asked", {})
        answer = self.hear(f"clock/{self.machine}/answered")
        # The first machine answers others before; what counts is how long it took from its answer.
        return None if answer is None else float(answer["seconds"]) - max(asked, time.time() - POLL_SECONDS)
