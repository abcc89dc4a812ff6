"""The launchers of one run on many machines: PyTorch's c10d rendezvous, elastic between a least and a most.

The machine named by `--rendezvous` holds the store through which all others meet, and its first process is rank 0:
the Record and the checkpoints stay there whoever comes or goes. Losing any other machine costs the steps since the
last checkpoint; losing this one ends the run.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from evenstep.errors import PlanError, TrainingError
from evenstep.launcher.failure import Cause
from evenstep.launcher.meeting import Place
from evenstep.launcher.network import (
    BEAT_SECONDS,
    JOIN_SECONDS,
    connect,
    hostname,
    interface_to,
    is_here,
    is_open,
    stranger,
    timed,
    warnings_about,
    who_holds,
)
from evenstep.launcher.signed import FORGED, TOKEN, Signed, opened, sealed
from evenstep.launcher.stores import EVERYWHERE, open_store
from evenstep.plan import Plan

T = TypeVar("T")
CONNECT_SECONDS = 3.0
WAIT_FOR_HEAD_SECONDS = 300.0
LAST_CALL_SECONDS = 3
LOST_SECONDS = 8.0
"""A machine that gives no sign of life for so long is lost."""
FAREWELL_SECONDS = 3.0
"""How long the first machine stays at the end, for the others to hear of it."""


class HeadLost(TrainingError):
    """The machine that holds the store does not answer."""


class Machines:
    """This launcher's place among those of other machines."""

    def __init__(self, address: tuple[str, int], machines: tuple[int, int], common: str, is_head: bool | None) -> None:
        self._host, self._port = address
        self._least, self._most = machines
        self._token = hashlib.sha256((os.environ.get(TOKEN) or common).encode()).digest()
        # What anybody who connects can read; the token itself never travels.
        self._name = hashlib.sha256(b"name of " + self._token).hexdigest()
        self.is_head = is_here(self._host) if is_head is None else is_head
        self.said: list[str] = warnings_about(self._host)
        self._store = PrefixStore(self._name[:16], self._open())
        self._handler = self._join()
        self._arrival = 0 if self.is_head else int(self._ask(lambda: self._store.add("arrivals", 1)))
        self._round: Store | None = None
        self._members: list[dict[str, Any]] = []
        self._beats: dict[int, tuple[int, float]] = {}
        self._num_lost = 0
        self._cause: Cause | None = None
        self._is_wanted = False
        self._answered = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._keep_in_touch, daemon=True).start()

    def publish(self, plan: Plan) -> None:
        """Tell the other machines what is trained."""
        text = self._sealed({"plan": plan.to_json()})
        self._ask(lambda: self._store.set("plan", text))

    def refuse(self, why: str) -> None:
        """Tell the other machines why nothing is trained, and those that are about to come."""
        text = self._sealed({"plan": None, "refused": why})
        self._ask(lambda: self._store.set("plan", text))
        self._see_others_off(self._least - 1)

    def read_plan(self) -> Plan:
        """What the first machine trains."""
        deadline = time.monotonic() + WAIT_FOR_HEAD_SECONDS
        while not self._ask(lambda: self._store.check(["plan"])):
            if time.monotonic() > deadline:
                raise TrainingError(f"{self._host} has not said what to train within {WAIT_FOR_HEAD_SECONDS:.0f} s")
            time.sleep(0.1)
        found = self._opened(self._ask(lambda: self._store.get("plan")))
        if found is None:
            raise TrainingError(FORGED)
        if found["plan"] is None:
            raise PlanError(f"{self._host} trains nothing: {found['refused']}")
        return Plan.from_json(found["plan"])

    def expects(self) -> str:
        """What is waited for now, in one line."""
        where = f"{self._host}:{self._port}"
        if self._members or self.is_head:
            return f"waiting for machines at {where}, {self._least} at least" if not self._members else ""
        num = self._ask(lambda: int(self._store.add("present", 0)))
        is_full = num >= self._most
        return f"waiting: the run at {where} has its {num} machines, and takes this one in when it loses one" * is_full

    def gather(self, num: int, attempt: int, resume: str | None = None) -> Place | None:
        """Wait until enough machines are there; ranks go by when a machine first came, not by its address."""
        self._round = None
        found = self._meet()
        if found is None:
            return None
        mine = {
            "arrival": self._arrival,
            "num": num,
            "attempt": attempt,
            "name": hostname(),
            "resume": resume,
            "port": self._new_store() if self.is_head else 0,
        }
        store = found.store
        self._ask(lambda: store.set(f"machine/{found.rank}", self._sealed(mine)))
        members = self._read_members(store, found.world_size)
        self._cause = None
        self._is_wanted = False
        self._beats = {}
        if members is None:
            self._round = store
            self.tell(Cause("a machine is lost: it came, and said no more", (), 0, is_loss=True))
            return self.gather(num, attempt, resume)
        members.sort(key=lambda member: member["arrival"])
        if self.is_head:
            more = len(members) - len(self._members)
            self._ask(lambda: self._store.add("present", more))
        self._members = members
        self._round = store
        return self._place(members, num)

    def _meet(self) -> Any:
        """The next round of the rendezvous; None if the run ended without this machine."""
        try:
            return self._ask(self._handler.next_rendezvous, None)
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            if not self._members:
                return None
            raise TrainingError("the run on the other machines has ended") from error
        except RendezvousTimeoutError as error:
            raise TrainingError(
                f"fewer than {self._least} machines came to {self._host}:{self._port} within {JOIN_SECONDS} s; "
                "start the same command on the others"
            ) from error
        except RendezvousConnectionError as error:
            raise self._head_lost() from error
        except RendezvousError as error:
            raise TrainingError(str(error)) from error

    def _read_members(self, store: Store, num: int) -> list[dict[str, Any]] | None:
        """What every machine of a round has said; None if one of them does not."""
        names = [f"machine/{number}" for number in range(num)]
        deadline = time.monotonic() + LOST_SECONDS
        # Not by waiting in the store: nobody else here could speak to it meanwhile, and this machine would seem lost.
        while not self._ask(lambda: store.check(names)):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        members = [self._opened(text) for text in self._ask(lambda: [store.get(name) for name in names])]
        if None in members:
            raise TrainingError(FORGED)
        return [member for member in members if member is not None]

    def _new_store(self) -> int:
        """A store for the workers of one attempt; what killed ones left in another would be taken for new ones'."""
        self._workers_store = open_store(EVERYWHERE)
        return int(self._workers_store.port)

    def _place(self, members: list[dict[str, Any]], num: int) -> Place:
        machine = next(index for index, member in enumerate(members) if member["arrival"] == self._arrival)
        nums = [int(member["num"]) for member in members]
        environment = {
            "MASTER_ADDR": self._host,
            "MASTER_PORT": str(members[0]["port"]),
            # Held by the first launcher, whoever comes: never two masters.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(max(member["attempt"] for member in members) - 1),
            "TORCHELASTIC_RUN_ID": self._name[:16],
        }
        interface = interface_to(self._host, self._port)
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            # By itself, gloo believes what the machine's own name resolves to, which on Debian is a loopback address.
            environment["GLOO_SOCKET_IFNAME"] = interface
        return Place(
            sum(nums[:machine]), sum(nums), machine, len(members), resume=members[0]["resume"], environment=environment
        )

    def tell(self, cause: Cause) -> Cause:
        """Say what failed here, and hear what is believed: whoever was first to say so.

        Ranks that failed because they lost others wait a while for what those have to say, or for their silence.
        """
        deadline = time.monotonic() + (LOST_SECONDS + 2 if cause.is_victim else 0)
        while self._cause is None and time.monotonic() < deadline:
            self._check_head()
            time.sleep(0.05)
        store = self._round
        if self._cause is None and store is not None:
            named = cause if cause.machine or cause.is_loss else replace(cause, machine=hostname())
            text = self._sealed(named.to_json())
            said = self._opened(self._ask(lambda: store.compare_set("cause", "", text)))
            self._cause = named if said is None else Cause.from_json(said)
        return self._cause or cause

    def heard(self) -> Cause | None:
        """What failed elsewhere; raises if the machine that holds the store is gone."""
        self._check_head()
        return self._cause

    def is_wanted(self, is_certain: bool = False) -> bool:
        """Whether a machine waits to be taken in; `is_certain` asks, since the word of it may still be on its way."""
        store = self._round
        if is_certain and not self._is_wanted and store is not None:
            # A store that is gone wants nobody.
            with suppress(HeadLost):
                self._is_wanted = self._ask(lambda: store.check(["wanted"]))
        return self._is_wanted

    def close(self) -> None:
        """Leave; the first machine takes the meeting place with it, once the others have left."""
        self._closed.set()
        if self._is_silent():
            return
        with suppress(HeadLost):
            if self.is_head:
                self._ask(self._handler.set_closed)
                self._see_others_off(self._ask(lambda: self._store.add("arrivals", 0)) - self._num_lost)
            else:
                self._ask(lambda: self._store.add("left", 1), FAREWELL_SECONDS)

    def _see_others_off(self, num: int) -> None:
        deadline = time.monotonic() + FAREWELL_SECONDS
        while time.monotonic() < deadline and self._ask(lambda: self._store.add("left", 0)) < num:
            time.sleep(0.05)

    def _open(self) -> TCPStore:
        where = f"{self._host}:{self._port}"
        if self.is_head:
            try:
                store = open_store(EVERYWHERE, self._port, JOIN_SECONDS)
            except OSError as error:
                why = os.strerror(error.errno or 0)
                raise PlanError(f"port {self._port} cannot be used ({why}); {who_holds(where)}") from error
            store.set("evenstep", self._name)
            return store
        deadline = time.monotonic() + WAIT_FOR_HEAD_SECONDS
        if not is_open(self._host, self._port):
            print(f"waiting for {where}; start the same command on that machine", file=sys.stderr, flush=True)
        while not is_open(self._host, self._port):
            if time.monotonic() > deadline:
                raise TrainingError(f"nobody answers at {where}; start the same command on that machine")
            time.sleep(0.2)
        store = timed(lambda: connect(self._host, self._port), CONNECT_SECONDS, lambda: stranger(where))
        deadline = time.monotonic() + CONNECT_SECONDS
        while not store.check(["evenstep"]):
            if time.monotonic() > deadline:
                raise stranger(where)
            time.sleep(0.05)
        if store.get("evenstep") != self._name.encode():
            raise PlanError(
                f"{where} is held by another run of evenstep; give each run its own port, and the same command "
                f"(and {TOKEN}, if set) to all machines of one run"
            )
        return store

    def _join(self) -> DynamicRendezvousHandler:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            run_id=self._name[:16],
            store=self._store,
            backend=Signed(self._store, self._name[:16], self._token),
            min_nodes=self._least,
            max_nodes=self._most,
            local_addr=hostname(),
            timeout=RendezvousTimeout(
                join=timedelta(seconds=JOIN_SECONDS), last_call=timedelta(seconds=LAST_CALL_SECONDS)
            ),
            keep_alive_interval=2,
            keep_alive_max_attempt=4,
        )
        return handler

    def _keep_in_touch(self) -> None:
        """A sign of life for the others, and what they have to say, in a thread: a dead link answers nothing."""
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self._store.add(f"beat/{self._arrival}", 1)
                store = self._round
                if store is not None:
                    self._listen(store)
                self._answered = time.monotonic()
            except Exception:
                # Silence is judged by its length, whatever the reason.
                continue

    def _listen(self, store: Store) -> None:
        if self._cause is None and store.check(["cause"]):
            said = self._opened(store.get("cause"))
            self._cause = None if said is None else Cause.from_json(said)
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
        before, since = self._beats.get(arrival, (-1, now))
        self._beats[arrival] = (count, now if count != before else since)
        if count == before and now - since > LOST_SECONDS and self._cause is None:
            self._num_lost += 1
            self.tell(Cause(f"machine {name} is lost: no sign of life for {now - since:.0f} s", (), 0, is_loss=True))

    def _is_silent(self) -> bool:
        return time.monotonic() - self._answered > LOST_SECONDS

    def _check_head(self) -> None:
        if self._is_silent() and not self.is_head:
            raise self._head_lost()

    def _head_lost(self) -> HeadLost:
        return HeadLost(
            f"{self._host}:{self._port} does not answer: the machine that holds the rendezvous is lost, or the way to "
            "it is cut, and the run cannot go on without it.\n"
            f"Start it there again, with --resume and the run's folder, and then here"
        )

    def _sealed(self, values: Mapping[str, Any]) -> str:
        """A message that only a machine with our token can write."""
        return sealed(self._token, values)

    def _opened(self, message: bytes) -> dict[str, Any] | None:
        """What such a message says; None if someone else wrote it."""
        return opened(self._token, message)

    def _ask(self, what: Callable[[], T], seconds: float | None = LOST_SECONDS) -> T:
        """Something that needs the store, in bounded time; or (None) for as long as its machine is there."""
        try:
            return timed(what, seconds, self._head_lost, self._check_head)
        except (ConnectionError, OSError, RuntimeError) as error:
            if isinstance(error, RendezvousError):
                raise
            raise self._head_lost() from error
