"""What machines leave for each other in a store, signed: who does not know the token cannot speak for one of them."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORGED = "someone who is no machine of this run writes into its rendezvous; use another port and another token"
DIGEST = "sha256"
DIGEST_BYTES = 32
_NEVER = (0, b"")


@dataclass(frozen=True)
class Seal:
    """The key of one run. A message is bound to it, to the place where it was left, and to its turn there."""

    key: bytes = field(repr=False)
    """Derived from the token and the id of the run: what was signed in another run is worth nothing here."""
    _seen: dict[str, tuple[int, bytes]] = field(default_factory=dict, repr=False, compare=False)
    """The latest turn seen at each place, and the signature there: an older message cannot come back."""
    _used: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    """The latest turn used at each place. Not seen: of two machines that write at once, the store takes one."""

    def sealed(self, place: str, values: Mapping[str, Any]) -> str:
        """A message for a place, which takes the turn after the latest that was read or written there."""
        turn = max(self._seen.get(place, _NEVER)[0], self._used.get(place, 0)) + 1
        self._used[place] = turn
        text = json.dumps({"place": place, "turn": turn, "values": values})
        return f"{self._signature(text.encode())}{text}"

    def opened(self, place: str, message: bytes) -> dict[str, Any] | None:
        """What a message says; None if it is someone else's, or belongs elsewhere, or is not newer than one seen."""
        written, text = message[: 2 * DIGEST_BYTES], message[2 * DIGEST_BYTES :]
        if not hmac.compare_digest(written, self._signature(text).encode()):
            return None
        found = json.loads(text)
        turn, seen = self._seen.get(place, _NEVER)
        if found["place"] != place or found["turn"] < turn or (found["turn"] == turn and written != seen):
            return None
        self._seen[place] = (found["turn"], written)
        values: dict[str, Any] = found["values"]
        return values

    def _signature(self, text: bytes) -> str:
        return hmac.digest(self.key, b"message " + text, DIGEST).hex()
