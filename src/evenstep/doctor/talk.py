"""What the doctors of several machines tell each other, through a store that one of them holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from evenstep.doctor.finding import MOST_SAID, finite
from evenstep.errors import TrainingError
from evenstep.launcher.signed import FORGED, Seal

T = TypeVar("T")
POLL_SECONDS = 0.005
ANSWER_SECONDS = 1800.0
"""Nobody is waited for longer than this; one that is lost is known to be so within seconds."""


class Misunderstood(TrainingError):
    """What was said is nothing that a doctor says, or was said by someone else."""


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
    seal: Seal
    """What only these machines have; all that they say is signed with it, for the place where it is left."""
    is_lost: Callable[[], bool] = lambda: False
    """Whether a machine is known to be gone, so that nobody need be waited for."""

    def tell(self, key: str, values: Mapping[str, Any]) -> None:
        """Leave plain values for whoever asks for them."""
        self.board.set(f"doctor/{key}", self.seal.sealed(f"doctor/{key}", values))

    def hear(self, key: str, read: Callable[[dict[str, Any]], T], seconds: float = ANSWER_SECONDS) -> T | None:
        """What `read` makes of what was left there; None if nothing comes.

        Not by waiting in the store: that would never end.
        """
        deadline = time.monotonic() + seconds
        while not self.board.check([f"doctor/{key}"]):
            if time.monotonic() > deadline or self.is_lost():
                return None
            time.sleep(POLL_SECONDS)
        return self._understood(key, self.board.get(f"doctor/{key}"), read)

    def _understood(self, key: str, text: bytes, read: Callable[[dict[str, Any]], T]) -> T:
        try:
            values = self.seal.opened(f"doctor/{key}", text)
            if values is None:
                raise Misunderstood(FORGED)
            return read(values)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            why = f"what another machine says is not understood here ({key}: {type(error).__name__}: {error})"
            raise Misunderstood(why[:MOST_SAID]) from error

    def seconds_behind(self) -> float | None:
        """How far this machine's clock is behind the first one's; each is answered in turn."""
        if self.machine:
            return self._ask_clock()
        for machine in range(1, self.num):
            if self.hear(f"clock/{machine}/asked", dict) is not None:
                self.tell(f"clock/{machine}/answered", {"seconds": time.time()})
        return 0.0

    def _ask_clock(self) -> float | None:
        asked = time.time()
        self.tell(f"clock/{self.machine}/asked", {})
        answer = self.hear(f"clock/{self.machine}/answered", lambda values: finite(values["seconds"]))
        # The first machine answers others before; what counts is how long it took from its answer.
        return None if answer is None else answer - max(asked, time.time() - POLL_SECONDS)
