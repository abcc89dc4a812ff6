"""The launchers of one run on many machines: PyTorch's c10d rendezvous, elastic between a minimum and a maximum.

The machine named by `--rendezvous` holds the store, and its first process is rank 0: the Record and the checkpoints
stay there, whichever machines join or leave. Losing any other machine costs the steps since the last checkpoint; losing
this one ends the run.

torch stores the state of a rendezvous as a pickle, which runs code where it is read, and with wall-clock times of the
machine that wrote it, so that a machine whose clock is 8 s behind is considered dead. Here the state is signed JSON in
which every time is a counter that changes when the time does. A machine that reads a new count takes its own time for
it; so clocks may differ, and may jump.

torch unpickles only what `SignedState` has pickled in the same process, a moment before.
"""

from __future__ import annotations

import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from evenstep.errors import PlanError, TrainingError
from evenstep.launcher.failure import Cause
from evenstep.launcher.rendezvous.addresses import (
    HEARTBEAT_SECONDS,
    JOIN_SECONDS,
    call_with_timeout,
    is_here,
    warnings_about,
)
from evenstep.launcher.rendezvous.auth import FORGED, MessageSigner
from evenstep.launcher.rendezvous.rank_assignment import RankAssignment
from evenstep.launcher.rendezvous.store_access import HEAD_SECONDS, host_run, join_run
from evenstep.launcher.rendezvous.version_check import Identity
from evenstep.launcher.variables import launcher_variables, master_variables, set_variables
from evenstep.plan import Plan
from evenstep.private_apis import NodeDesc, RendezvousState, Store

KEY = "rendezvous"
NOTHING = "-"
"""The state before any machine joined: a store would block on a missing key."""
LAST_CALL = timedelta(seconds=3)
"""How long to wait for more machines once the minimum has joined."""
LONG_CALL = timedelta(seconds=10)
"""The same, for a machine that is known to wait: without it, the next round would end at once to take it in."""
LOST_SECONDS = 8.0
"""A machine without a heartbeat for this long is lost."""
LEAVING_SECONDS = 3.0
"""How long the first machine waits at the end for the other machines to leave."""
Node = tuple[str, int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Wire:
    """A RendezvousState in the form that is sent."""

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

    A state that is not signed by a machine of the run, or is older than one read before, is ignored; the next write
    replaces it.
    """

    def __init__(self, store: Store, signer: MessageSigner) -> None:
        self._store = store
        self._signer = signer
        self.times = Times()
        self._latest: Wire | None = None
        self._ask(lambda: store.compare_set(KEY, "", NOTHING))

    @property
    def name(self) -> str:
        return "c10d"

    @property
    def round(self) -> int:
        """The round of the latest state; it does not change while this machine takes part in it."""
        return self._latest.round if self._latest is not None else 0

    def get_state(self) -> tuple[bytes, Any] | None:
        """The latest state in torch's form, and the stored message, for `set_state` to compare with."""
        return self._read(self._ask(lambda: self._store.get(KEY)))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace what `get_state` found, unless another machine has replaced it first."""
        wire = self.times.to_wire(pickle.loads(state))
        text = self._signer.sign(KEY, asdict(wire))
        before = token.decode() if isinstance(token, bytes) else NOTHING
        written = self._ask(lambda: self._store.compare_set(KEY, before, text))
        found = self._read(written)
        return None if found is None else (*found, written == text.encode())

    def _read(self, message: bytes) -> tuple[bytes, Any] | None:
        values = None if message == NOTHING.encode() else self._signer.verify(KEY, message)
        if values is not None:
            self._latest = msgspec.convert(values, Wire)
        if self._latest is None:
            return None
        return pickle.dumps(self.times.from_wire(self._latest)), message

    def _ask(self, what: Callable[[], T]) -> T:
        try:
            return what()
        except (ValueError, RuntimeError) as error:
            raise RendezvousConnectionError(str(error)) from error


class Times:
    """Converts other machines' time counters to this machine's clock: the time at which a new count was first read."""

    def __init__(self) -> None:
        self.num_expected = 0
        """Machines to wait longer for."""
        self._last_call = LAST_CALL
        self._seen: dict[Hashable, tuple[int, float]] = {}
        self._given: dict[Hashable, datetime] = {}

    def from_wire(self, wire: Wire) -> Any:
        """torch's state, with this machine's times."""
        state = RendezvousState()
        state.round, state.complete, state.closed = wire.round, wire.complete, wire.closed
        self._last_call = LAST_CALL if len(wire.participants) >= self.num_expected else LONG_CALL
        state.deadline = None if wire.deadline is None else self._local(None, wire.deadline) + self._last_call
        state.participants = {NodeDesc(*node): rank for node, rank in wire.participants}
        state.wait_list = {NodeDesc(*node) for node in wire.wait_list}
        state.redundancy_list = {NodeDesc(*node) for node in wire.redundancy_list}
        state.last_heartbeats = {NodeDesc(*node): self._local(node, number) for node, number in wire.last_heartbeats}
        return state

    def to_wire(self, state: Any) -> Wire:
        """The form that is sent to other machines."""
        return Wire(
            round=state.round,
            complete=state.complete,
            closed=state.closed,
            deadline=None if state.deadline is None else self._number(None, state.deadline - self._last_call),
            participants=[(_plain(node), rank) for node, rank in state.participants.items()],
            wait_list=[_plain(node) for node in state.wait_list],
            redundancy_list=[_plain(node) for node in state.redundancy_list],
            last_heartbeats=[
                (_plain(node), self._number(_plain(node), when)) for node, when in state.last_heartbeats.items()
            ],
        )

    def _local(self, whose: Hashable, number: int) -> datetime:
        """The time by the monotonic clock, as a wall-clock time for torch to compare with now."""
        now = time.monotonic()
        if self._seen.get(whose, (None,))[0] != number:
            self._seen[whose] = (number, now)
        self._given[whose] = datetime.now(UTC) - timedelta(seconds=now - self._seen[whose][1])
        return self._given[whose]

    def _number(self, whose: Hashable, when: datetime) -> int:
        """The count that was read, or the next one if torch has changed the time."""
        number = self._seen.get(whose, (0,))[0]
        return number if when == self._given.get(whose) else number + 1


def _plain(node: Any) -> Node:
    return node.addr, node.pid, node.local_id


class HeadLost(TrainingError):
    """The machine that holds the store does not respond."""


class C10dRendezvous:
    """The rendezvous of this launcher with those of other machines."""

    num_before = 0
    """Processes of other launchers on this machine that come before this one's, as Slurm starts a script's."""
    num_here = 0
    """Processes on this machine, those of other launchers included; 0: there is no other launcher."""

    def __init__(
        self, address: tuple[str, int], machines: tuple[int, int], identity: Identity, is_head: bool | None
    ) -> None:
        self._host, self._port = address
        self._least, self._most = machines
        self.is_head = is_here(self._host) if is_head is None else is_head
        self.warnings = warnings_about(self._host)
        self._access = host_run(address, identity) if self.is_head else join_run(address, identity)
        self._signer = self._access.signer
        self._store: Store = self._access.store
        self._round: Store | None = None
        self._members: list[dict[str, Any]] = []
        self._heartbeats: dict[int, tuple[int, float]] = {}
        self._num_lost = 0
        self._cause: Cause | None = None
        self._is_wanted = False
        self._closed = threading.Event()
        try:
            self._state = self._ask(lambda: SignedState(self._store, self._signer), HEAD_SECONDS)
            self._handler = self._join()
            self._arrival = 0 if self.is_head else self._ask(lambda: self._store.add("arrivals", 1), HEAD_SECONDS)
        except BaseException:
            self._access.close()
            raise
        self._answered = time.monotonic()
        threading.Thread(target=self._heartbeat_loop, daemon=True).start()

    def publish(self, plan: Plan) -> None:
        self._publish({"plan": plan.to_json()})

    def refuse(self, why: str) -> None:
        """Tell the other machines, also those that join in the next seconds, why nothing is trained."""
        self._publish({"plan": None, "refused": why})
        self._wait_until_left(self._least - 1)

    def _publish(self, values: Mapping[str, Any]) -> None:
        text = self._signer.sign("plan", values)
        self._ask(lambda: self._store.set("plan", text))

    def read_plan(self) -> Plan:
        # The first machine may be loading data, and too busy to respond.
        (found,) = self._read(self._store, {"plan": "plan"}, HEAD_SECONDS) or (None,)
        if found is None:
            raise TrainingError(f"{self._host} has not sent its plan within {HEAD_SECONDS:.0f} s")
        if found["plan"] is None:
            raise PlanError(f"{self._host} refused to start: {found['refused']}")
        return Plan.from_json(found["plan"])

    def _read(self, store: Store, slots: Mapping[str, str], seconds: float) -> list[dict[str, Any]] | None:
        """The messages under these keys, each with the slot it is signed for; None if one is missing.

        A message without a valid signature is ignored: the right machine may still write its own.
        """
        deadline = time.monotonic() + seconds
        is_forged = False
        while time.monotonic() < deadline:
            # Poll: a blocking wait would hold the store's connection, and this machine would seem lost.
            if self._ask(lambda: store.check(list(slots)), seconds):
                texts = self._ask(lambda: [store.get(key) for key in slots], seconds)
                found = [self._signer.verify(slot, text) for slot, text in zip(slots.values(), texts, strict=True)]
                if None not in found:
                    return [one for one in found if one is not None]
                is_forged = True
            time.sleep(0.05)
        if is_forged:
            raise TrainingError(FORGED)
        return None

    def waiting_message(self) -> str:
        where = f"{self._host}:{self._port}"
        if self._members or self.is_head:
            return f"waiting for machines at {where}, at least {self._least}" if not self._members else ""
        num = self._ask(lambda: int(self._store.add("present", 0)))
        is_full = num >= self._most
        return f"waiting: the run at {where} has all its {num} machines; this one joins when one is lost" * is_full

    def next_round(self, num: int, attempt: int, resume: str | None = None) -> RankAssignment | None:
        """Wait for enough machines; ranks follow the order in which machines first joined."""
        self._round = None
        self._state.times.num_expected = len(self._members) + 1 if self._is_wanted else 0
        found = self._rendezvous()
        if found is None:
            return None
        port = 0
        if self.is_head:
            # A new store for each attempt: a killed worker's keys would be mistaken for a new one's.
            self._workers_store, port = self._access.open_workers_store()
        mine = {
            "arrival": self._arrival,
            "num": num,
            "attempt": attempt,
            "name": socket.gethostname(),
            "resume": resume,
            "port": port,
        }
        store, here = found.store, f"round {self._state.round}"
        text = self._signer.sign(f"{here} machine {found.rank}", mine)
        self._ask(lambda: store.set(f"machine/{found.rank}", text))
        everyone = {f"machine/{rank}": f"{here} machine {rank}" for rank in range(found.world_size)}
        members = self._read(store, everyone, LOST_SECONDS)
        self._cause = None
        self._is_wanted = False
        self._heartbeats = {}
        if members is None:
            self._round = store
            self.report_failure(Cause("a machine is lost: it joined, and then stopped responding", (), 0, is_loss=True))
            return self.next_round(num, attempt, resume)
        members.sort(key=lambda member: member["arrival"])
        if self.is_head:
            more = len(members) - len(self._members)
            self._ask(lambda: self._store.add("present", more))
        self._members = members
        self._round = store
        return self._assignment(members, num)

    def _rendezvous(self) -> Any:
        """The next round of the rendezvous; None if the run ended without this machine."""
        try:
            return self._ask(self._handler.next_rendezvous, None)
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            if not self._members:
                return None
            raise TrainingError("the run on the other machines has ended") from error
        except RendezvousTimeoutError as error:
            raise TrainingError(
                f"fewer than {self._least} machines joined at {self._host}:{self._port} within {JOIN_SECONDS} s; "
                "start the same command on the other machines"
            ) from error
        except RendezvousConnectionError as error:
            raise self._head_lost() from error
        except RendezvousError as error:
            raise TrainingError(str(error)) from error

    def _assignment(self, members: list[dict[str, Any]], num: int) -> RankAssignment:
        machine = next(index for index, member in enumerate(members) if member["arrival"] == self._arrival)
        nums = [int(member["num"]) for member in members]
        environment = {
            # The launcher's own port on every machine; it relays the workers' connections to the first machine, whose
            # launcher holds the store, never a worker.
            **master_variables(self._access.port_to(members[0]["port"]), is_store_held=True),
            "TORCHELASTIC_RESTART_COUNT": str(max(member["attempt"] for member in members) - 1),
            "TORCHELASTIC_RUN_ID": self._access.run,
        }
        interface = self._access.interface((self._host, self._port))
        if interface and not launcher_variables().GLOO_SOCKET_IFNAME:
            # gloo's default is what the machine's own name resolves to, which on Debian is a loopback address.
            environment["GLOO_SOCKET_IFNAME"] = interface
        return RankAssignment(
            sum(nums[:machine]),
            sum(nums),
            machine,
            len(members),
            self.num_before,
            self.num_here,
            resume=members[0]["resume"],
            environment=environment,
        )

    def report_failure(self, cause: Cause) -> Cause:
        """Publish what failed here; return the cause that was published first.

        Ranks that failed because they lost other ranks first wait for those ranks' own cause, or for their timeout.
        """
        deadline = time.monotonic() + (LOST_SECONDS + 2 if cause.is_victim else 0)
        while self._cause is None and time.monotonic() < deadline:
            self._check_head()
            time.sleep(0.05)
        store = self._round
        if self._cause is None and store is not None:
            named = cause if cause.machine or cause.is_loss else replace(cause, machine=socket.gethostname())
            text = self._signer.sign(self._cause_key, named.to_json())
            first = self._signer.verify(self._cause_key, self._ask(lambda: store.compare_set("cause", "", text)))
            self._cause = named if first is None else Cause.from_json(first)
        return self._cause or cause

    def remote_failure(self) -> Cause | None:
        """What failed on another machine; raises if the machine that holds the store is lost."""
        self._check_head()
        return self._cause

    def has_waiting_machine(self, asks_store: bool = False) -> bool:
        store = self._round
        if asks_store and not self._is_wanted and store is not None:
            # Without a store, no machine can join.
            with suppress(HeadLost):
                self._is_wanted = self._ask(lambda: store.check(["wanted"]))
        return self._is_wanted

    def close(self) -> None:
        """Leave; the first machine closes the store once the other machines have left."""
        self._closed.set()
        with suppress(HeadLost):
            if not self._is_silent():
                self._announce_leaving()
        self._access.close()

    def _announce_leaving(self) -> None:
        if self.is_head:
            self._ask(self._handler.set_closed)
            self._wait_until_left(self._ask(lambda: self._store.add("arrivals", 0)) - self._num_lost)
        else:
            self._ask(lambda: self._store.add("left", 1), LEAVING_SECONDS)

    def _wait_until_left(self, num: int) -> None:
        deadline = time.monotonic() + LEAVING_SECONDS
        while time.monotonic() < deadline and self._ask(lambda: self._store.add("left", 0)) < num:
            time.sleep(0.05)

    def _join(self) -> DynamicRendezvousHandler:
        set_variables({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            run_id=self._access.run,
            store=self._store,
            backend=self._state,
            min_nodes=self._least,
            max_nodes=self._most,
            # torch identifies machines by this and the process id, and containers may share both.
            local_addr=f"{socket.gethostname()}-{secrets.token_hex(8)}",
            timeout=RendezvousTimeout(join=timedelta(seconds=JOIN_SECONDS), last_call=LAST_CALL),
            keep_alive_interval=2,
            keep_alive_max_attempt=4,
        )
        return handler

    def _heartbeat_loop(self) -> None:
        """Send heartbeats and read messages, in a thread, since a call over a dead link blocks."""
        while not self._closed.wait(HEARTBEAT_SECONDS):
            try:
                self._store.add(f"beat/{self._arrival}", 1)
                store = self._round
                if store is not None:
                    self._read_messages(store)
                self._answered = time.monotonic()
            except Exception:
                # Only the time without an answer counts, whatever the error.
                continue

    def _read_messages(self, store: Store) -> None:
        if self._cause is None and store.check(["cause"]):
            values = self._signer.verify(self._cause_key, store.get("cause"))
            self._cause = None if values is None else Cause.from_json(values)
        if not self.is_head:
            self._is_wanted = self._is_wanted or store.check(["wanted"])
            return
        if len(self._members) < self._most and self._handler.num_nodes_waiting() > 0:
            store.set("wanted", "1")
            self._is_wanted = True
        for member in self._members:
            self._watch(member["arrival"], member["name"])

    def _watch(self, arrival: int, name: str) -> None:
        now = time.monotonic()
        count = self._store.add(f"beat/{arrival}", 0)
        before, since = self._heartbeats.get(arrival, (-1, now))
        self._heartbeats[arrival] = (count, now if count != before else since)
        if count == before and now - since > LOST_SECONDS and self._cause is None:
            self._num_lost += 1
            self.report_failure(
                Cause(f"machine {name} is lost: no heartbeat for {now - since:.0f} s", (), 0, is_loss=True)
            )

    def _is_silent(self) -> bool:
        return time.monotonic() - self._answered > LOST_SECONDS

    def _check_head(self) -> None:
        if self._is_silent() and not self.is_head:
            raise self._head_lost()

    def _head_lost(self) -> HeadLost:
        return HeadLost(
            f"{self._host}:{self._port} does not answer: the machine that holds the rendezvous is lost, or the "
            "network to it is down, and the run cannot continue without it.\n"
            f"Start it there again, with --resume and the run's folder, and then here"
        )

    @property
    def _cause_key(self) -> str:
        return f"round {self._state.round} cause"

    def _ask(self, what: Callable[[], T], seconds: float | None = LOST_SECONDS) -> T:
        """Call into the store, within a time limit, or (None) for as long as its machine responds."""
        try:
            return call_with_timeout(what, seconds, self._head_lost, self._check_head)
        except (ConnectionError, OSError, RuntimeError) as error:
            if isinstance(error, RendezvousError):
                raise
            raise self._head_lost() from error
