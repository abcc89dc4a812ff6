"""What machines tell each other, signed: whoever does not know the token cannot speak for one of them."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

TOKEN = "EVENSTEP_TOKEN"
"""A secret that all machines of a run share; without it, what is common to their commands."""
FORGED = "someone who is no machine of this run writes into its rendezvous; use another port and another token"


class Signed(C10dRendezvousBackend):
    """torch keeps the state of the rendezvous as a pickle; only one that was signed with our token is unpickled."""

    def __init__(self, store: Any, name: str, token: bytes) -> None:
        super().__init__(store, name)
        self._token = token

    def get_state(self) -> tuple[bytes, Any] | None:
        found = super().get_state()
        return None if found is None else (self._checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found = super().set_state(signature(self._token, state) + state, token)
        return None if found is None else (self._checked(found[0]), found[1], found[2])

    def _checked(self, signed: bytes) -> bytes:
        written, state = signed[:32], signed[32:]
        if not hmac.compare_digest(written, signature(self._token, state)):
            raise RendezvousStateError(FORGED)
        return state


def signature(token: bytes, text: bytes) -> bytes:
    return hmac.digest(token, text, "sha256")


def sealed(token: bytes, values: Mapping[str, Any]) -> str:
    """A message that only a machine with this token can write."""
    text = json.dumps(values)
    return f"{signature(token, text.encode()).hex()}{text}"


def opened(token: bytes, message: bytes) -> dict[str, Any] | None:
    """What such a message says; None if someone else wrote it."""
    written, text = message[:64], message[64:]
    if not hmac.compare_digest(written, signature(token, text).hex().encode()):
        return None
    values: dict[str, Any] = json.loads(text)
    return values
