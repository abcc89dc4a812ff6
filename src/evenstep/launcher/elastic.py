"""torch's elastic rendezvous, without what makes it unsafe between machines: pickles, and clocks that must agree.

torch keeps the state of a rendezvous as a pickle, which runs code where it is read, and full of times of day of the
machine that wrote it, so that a machine whose clock is 8 s behind is taken for dead by the others, or they by it. Here
it travels as signed JSON in which every time is a number that changes when the time does. A machine turns a number that
it has not seen before into a time of its own; so clocks may differ, and may jump.

Private parts of torch, as in 2.11 and 2.13: _RendezvousState and _NodeDesc of dynamic_rendezvous. torch unpickles only
what `SignedState` has pickled in the same process, a moment before.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, _NodeDesc, _RendezvousState

from evenstep.launcher.signed import Seal

T = TypeVar("T")
KEY = "rendezvous"
NOTHING = "-"
"""Of a rendezvous that nobody has come to: a store waits for a key that is not there."""
LAST_CALL = timedelta(seconds=3)
"""For more machines, once the least number is there."""
Node = tuple[str, int, int]


@dataclass(frozen=True)
class Wire:
    """A _RendezvousState as it travels."""

    round: int
    complete: bool
    closed: bool
    deadline: int | None
    participants: list[tuple[Node, int]]
    wait_list: list[Node]
    redundancy_list: list[Node]
    last_heartbeats: list[tuple[Node, int]]


class SignedState(RendezvousBackend):
    """The state of the rendezvous in a store, as signed JSON.

    What is not signed by a machine of the run, or is older than what was seen, is not read: the state before it stands,
    and the next machine that writes puts it back.
    """

    def __init__(self, store: Store, seal: Seal) -> None:
        self._store = store
        self._seal = seal
        self._times = Times()
        self._latest: Wire | None = None
        self._ask(lambda: store.compare_set(KEY, "", NOTHING))

    @property
    def name(self) -> str:
        """As torch knows it."""
        return "c10d"

    @property
    def round(self) -> int:
        """Of the latest state; it does not change while this machine takes part in it."""
        return self._latest.round if self._latest is not None else 0

    def get_state(self) -> tuple[bytes, Any] | None:
        """The latest state as torch wants it, and what was found in the store, to be replaced by `set_state`."""
        return self._read(self._ask(lambda: self._store.get(KEY)))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace what `get_state` found, unless someone was quicker."""
        wire = self._times.to_wire(pickle.loads(state))
        text = self._seal.sealed(KEY, asdict(wire))
        before = token.decode() if isinstance(token, bytes) else NOTHING
        written = self._ask(lambda: self._store.compare_set(KEY, before, text))
        found = self._read(written)
        return None if found is None else (*found, written == text.encode())

    def _read(self, message: bytes) -> tuple[bytes, Any] | None:
        values = None if message == NOTHING.encode() else self._seal.opened(KEY, message)
        if values is not None:
            self._latest = msgspec.convert(values, Wire)
        if self._latest is None:
            return None
        return pickle.dumps(self._times.from_wire(self._latest)), message

    def _ask(self, what: Callable[[], T]) -> T:
        try:
            return what()
        except (ValueError, RuntimeError) as error:
            raise RendezvousConnectionError(str(error)) from error


class Times:
    """Times of other machines, as this one's clock would have it: when it first saw that they had changed."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[int, float]] = {}
        self._given: dict[Hashable, datetime] = {}

    def from_wire(self, wire: Wire) -> Any:
        """torch's own state, with times of this machine."""
        state = _RendezvousState()
        state.round, state.complete, state.closed = wire.round, wire.complete, wire.closed
        state.deadline = None if wire.deadline is None else self._local(None, wire.deadline) + LAST_CALL
        state.participants = {_NodeDesc(*node): rank for node, rank in wire.participants}
        state.wait_list = {_NodeDesc(*node) for node in wire.wait_list}
        state.redundancy_list = {_NodeDesc(*node) for node in wire.redundancy_list}
        state.last_heartbeats = {_NodeDesc(*node): self._local(node, number) for node, number in wire.last_heartbeats}
        return state

    def to_wire(self, state: Any) -> Wire:
        """What other machines are to read."""
        return Wire(
            round=state.round,
            complete=state.complete,
            closed=state.closed,
            deadline=None if state.deadline is None else self._number(None, state.deadline - LAST_CALL),
            participants=[(_plain(node), rank) for node, rank in state.participants.items()],
            wait_list=[_plain(node) for node in state.wait_list],
            redundancy_list=[_plain(node) for node in state.redundancy_list],
            last_heartbeats=[
                (_plain(node), self._number(_plain(node), when)) for node, when in state.last_heartbeats.items()
            ],
        )

    def _local(self, whose: Hashable, number: int) -> datetime:
        """By a clock that nobody sets, since torch compares it at once with the one that people do."""
        now = time.monotonic()
        if self._seen.get(whose, (None,))[0] != number:
            self._seen[whose] = (number, now)
        self._given[whose] = datetime.now(UTC) - timedelta(seconds=now - self._seen[whose][1])
        return self._given[whose]

    def _number(self, whose: Hashable, when: datetime) -> int:
        """The number that was read, or the next one if torch has set the time anew."""
        number = self._seen.get(whose, (0,))[0]
        return number if when == self._given.get(whose) else number + 1


def _plain(node: Any) -> Node:
    return node.addr, node.pid, node.local_id
