"""The launchers of one run on many machines: PyTorch's c10d rendezvous, elastic between a least and a most.

The machine named by `--rendezvous` holds the store through which all others meet, and its first process is rank 0:
the Record and the checkpoints stay there whoever comes or goes. Losing any other machine costs the steps since the
last checkpoint; losing this one ends the run.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import psutil
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from evenstep.errors import PlanError, TrainingError
from evenstep.launcher.failure import Cause
from evenstep.launcher.meeting import Place
from evenstep.launcher.stores import EVERYWHERE, open_store
from evenstep.plan import Plan

T = TypeVar("T")
TOKEN = "EVENSTEP_TOKEN"
"""A secret that all machines of a run share; without it, what is common to their commands."""
CONNECT_SECONDS = 5.0
WAIT_FOR_HEAD_SECONDS = 300.0
JOIN_SECONDS = 600
LAST_CALL_SECONDS = 3
BEAT_SECONDS = 0.5
LOST_SECONDS = 8.0
"""A machine that gives no sign of life for so long is lost."""


class HeadLost(TrainingError):
    """The machine that holds the store does not answer."""


class Machines:
    """This launcher's place among those of other machines."""

    def __init__(self, address: tuple[str, int], machines: tuple[int, int], common: str, is_head: bool | None) -> None:
        self._host, self._port = address
        self._least, self._most = machines
        self._token = hashlib.sha256((os.environ.get(TOKEN) or common).encode()).hexdigest()
        self.is_head = _is_here(self._host) if is_head is None else is_head
        self.said: list[str] = _warnings(self._host)
        self._store = PrefixStore(self._token[:16], self._open())
        self._handler = self._join()
        self._arrival = 0 if self.is_head else int(self._ask(lambda: self._store.add("arrivals", 1)))
        self._round: Store | None = None
        self._members: list[dict[str, Any]] = []
        self._beats: dict[int, tuple[int, float]] = {}
        self._cause: Cause | None = None
        self._is_wanted = False
        self._answered = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._keep_in_touch, daemon=True).start()

    def publish(self, plan: Plan | None, refused: str = "") -> None:
        """Tell the other machines what is trained, or why nothing is."""
        text = json.dumps({"token": self._token, "plan": plan.to_json() if plan else None, "refused": refused})
        self._ask(lambda: self._store.set("plan", text))

    def read_plan(self) -> Plan:
        """What the first machine trains."""
        deadline = time.monotonic() + WAIT_FOR_HEAD_SECONDS
        while not self._ask(lambda: self._store.check(["plan"])):
            if time.monotonic() > deadline:
                raise TrainingError(f"{self._host} has not said what to train within {WAIT_FOR_HEAD_SECONDS:.0f} s")
            time.sleep(0.1)
        found = json.loads(self._ask(lambda: self._store.get("plan")))
        if found["plan"] is None:
            raise PlanError(f"{self._host} trains nothing: {found['refused']}")
        return Plan.from_json(found["plan"])

    def gather(self, num: int, attempt: int, resume: str | None = None) -> Place:
        """Wait until enough machines are there; ranks go by when a machine first came, not by its address."""
        self._round = None
        try:
            found = self._ask(self._handler.next_rendezvous, JOIN_SECONDS + 10)
        except RendezvousClosedError as error:
            raise TrainingError("the run on the other machines has ended") from error
        except (RendezvousTimeoutError, RendezvousError) as error:
            raise TrainingError(
                f"fewer than {self._least} machines came to {self._host}:{self._port} within {JOIN_SECONDS} s; "
                "start the same command on the others"
            ) from error
        mine = {
            "token": self._token,
            "arrival": self._arrival,
            "num": num,
            "attempt": attempt,
            "name": _name(),
            "resume": resume,
            "port": self._new_store() if self.is_head else 0,
        }
        store = found.store
        self._ask(lambda: store.set(f"machine/{found.rank}", json.dumps(mine)), JOIN_SECONDS)
        names = [f"machine/{number}" for number in range(found.world_size)]
        members = [json.loads(text) for text in self._ask(lambda: [store.get(name) for name in names], 60)]
        if any(member.get("token") != self._token for member in members):
            raise TrainingError("a machine of another run has come to this one's rendezvous; give each its own port")
        members.sort(key=lambda member: member["arrival"])
        self._members = members
        self._beats = {}
        self._cause = None
        self._is_wanted = False
        self._round = store
        return self._place(members, num)

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
            "TORCHELASTIC_RUN_ID": self._token[:16],
        }
        interface = _interface_to(self._host, self._port)
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            # By itself, gloo believes what the machine's own name resolves to, which on Debian is a loopback address.
            environment["GLOO_SOCKET_IFNAME"] = interface
        return Place(
            sum(nums[:machine]), sum(nums), machine, len(members), resume=members[0]["resume"], environment=environment
        )

    def tell(self, cause: Cause) -> None:
        """Say what failed here; the first to say so is believed."""
        store = self._round
        if store is None:
            return
        text = json.dumps({**cause.to_json(), "machine": cause.machine or _name(), "token": self._token})
        said = self._ask(lambda: store.compare_set("cause", "", text))
        self._cause = Cause.from_json(json.loads(said))

    def heard(self) -> Cause | None:
        """What failed elsewhere; raises if the machine that holds the store is gone."""
        self._check_head()
        return self._cause

    def is_wanted(self) -> bool:
        """Whether a machine waits to be taken in."""
        return self._is_wanted

    def close(self) -> None:
        """Leave; the first machine takes the meeting place with it, once the others have left."""
        self._closed.set()
        if self.is_head and not self._is_silent():
            self._ask(self._handler.set_closed)

    def _open(self) -> TCPStore:
        where = f"{self._host}:{self._port}"
        if self.is_head:
            try:
                store = open_store(EVERYWHERE, self._port, JOIN_SECONDS)
            except OSError as error:
                raise PlanError(f"port {self._port} cannot be used ({error.strerror}); {_who_holds(where)}") from error
            store.set("evenstep", self._token)
            return store
        deadline = time.monotonic() + WAIT_FOR_HEAD_SECONDS
        while not _is_open(self._host, self._port):
            if time.monotonic() > deadline:
                raise TrainingError(f"nobody answers at {where}; start the same command on that machine")
            time.sleep(0.2)
        store = _timed(lambda: _client(self._host, self._port), CONNECT_SECONDS, lambda: _stranger(where))
        deadline = time.monotonic() + CONNECT_SECONDS
        while not store.check(["evenstep"]):
            if time.monotonic() > deadline:
                raise _stranger(where)
            time.sleep(0.05)
        if store.get("evenstep") != self._token.encode():
            raise PlanError(
                f"{where} is held by another run of evenstep; give each run its own port, and the same command "
                f"(and {TOKEN}, if set) to all machines of one run"
            )
        return store

    def _join(self) -> DynamicRendezvousHandler:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            run_id=self._token[:16],
            store=self._store,
            backend=Signed(self._store, self._token),
            min_nodes=self._least,
            max_nodes=self._most,
            local_addr=_name(),
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
            self._cause = Cause.from_json(json.loads(store.get("cause")))
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
            self.tell(
                Cause(
                    f"machine {name} is lost: no sign of life for {now - since:.0f} s",
                    (),
                    0,
                    machine="",
                    is_loss=True,
                )
            )

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

    def _ask(self, what: Callable[[], T], seconds: float = LOST_SECONDS) -> T:
        """Something that needs the store, in bounded time."""
        try:
            return _timed(what, seconds, self._head_lost)
        except (ConnectionError, OSError, RuntimeError) as error:
            if isinstance(error, RendezvousError):
                raise
            raise self._head_lost() from error


class Signed(C10dRendezvousBackend):
    """torch keeps the state of the rendezvous as a pickle; only one that has our token is unpickled."""

    def __init__(self, store: Any, token: str) -> None:
        super().__init__(store, token[:16])
        self._token = token.encode()

    def get_state(self) -> tuple[bytes, Any] | None:
        found = super().get_state()
        return None if found is None else (self._checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found = super().set_state(self._signature(state) + state, token)
        return None if found is None else (self._checked(found[0]), found[1], found[2])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._token, state, "sha256")

    def _checked(self, signed: bytes) -> bytes:
        signature, state = signed[:32], signed[32:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousError("the state of the rendezvous was not written by a machine of this run")
        return state


def _timed(what: Callable[[], T], seconds: float, late: Callable[[], Exception]) -> T:
    """`what()` in a thread of its own: a call into a store whose machine is gone may never come back."""
    done: list[T] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            done.append(what())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise late()
    return done[0]


def _client(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))


def _stranger(where: str) -> PlanError:
    return PlanError(f"{where} is held by a program that is no rendezvous; choose another port")


def _who_holds(where: str) -> str:
    host, _, port = where.rpartition(":")
    try:
        store = _timed(lambda: _client(host, int(port)), 2.0, lambda: _stranger(where))
        is_ours = bool(store.check(["evenstep"]))
    except Exception:
        is_ours = False
    holder = "another run of evenstep holds it" if is_ours else "another program holds it"
    return f"{holder}; choose another port, the same on all machines"


def _is_open(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def _is_here(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    try:
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise PlanError(f"the name {host!r} is not known here ({error.strerror}); give an address instead") from error
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return bool(wanted & own) or any(one.startswith("127.") for one in wanted)


def _interface_to(host: str, port: int) -> str | None:
    """The interface by which this machine reaches the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((host, port))  # sends nothing
        except OSError:
            return None
        mine = way.getsockname()[0]
    found = [name for name, every in psutil.net_if_addrs().items() for one in every if one.address == mine]
    return found[0] if found else None


def _warnings(host: str) -> list[str]:
    try:
        addresses = [ipaddress.ip_address(str(info[4][0])) for info in socket.getaddrinfo(host, None)]
    except (OSError, ValueError):
        return []
    if any(address.is_global for address in addresses):
        return [f"{host} is a public address: anyone may knock at the rendezvous; use a private network, and {TOKEN}"]
    return []


def _name() -> str:
    return socket.gethostname()
