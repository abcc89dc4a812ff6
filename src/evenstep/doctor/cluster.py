"""The doctor on several machines: compare their versions and clocks, and run an all-reduce between every two of them.

The same command runs on each machine. They exchange signed messages through the first machine's store; every value that
is read from another machine is converted to its expected type, or refused.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import psutil
import torch
from torch._C._distributed_c10d import TCPStore

import evenstep
from evenstep.doctor.bandwidth import ALL_BYTES, CPU_SECONDS, GPU_SECONDS, add_up_between, rounds
from evenstep.doctor.checks import CheckStarted, Examination, Report, examine
from evenstep.doctor.finding import MAX_TEXT_CHARS, MOST_NAME, Finding, finite, worst
from evenstep.doctor.gpus import num_gpus
from evenstep.doctor.remedies import (
    SUSPECTS,
    Reference,
    TimeBudget,
    Trial,
    is_sound,
    judge,
    remedies,
    search,
    with_interface,
)
from evenstep.doctor.sandbox import Ended, Job, Settings, try_out
from evenstep.errors import TrainingError
from evenstep.launcher.environment import TOKEN
from evenstep.launcher.rendezvous import RankAssignment
from evenstep.launcher.rendezvous.auth import FORGED, MessageSigner
from evenstep.launcher.rendezvous.c10d import C10dRendezvous, HeadLost
from evenstep.launcher.rendezvous.version_check import Identity
from evenstep.monitor.stragglers import SLOW
from evenstep.plan import parse_address, parse_machines

T = TypeVar("T")
POLL_SECONDS = 0.005
ANSWER_SECONDS = 1800.0
"""The longest wait for a message; a lost machine is detected within seconds."""


class BadMessage(TrainingError):
    """A message that cannot be read, or is not signed by a machine of this run."""


class MessageStore(Protocol):
    """A key-value store, as torch's Store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class Channel:
    """Signed messages between this machine and the others."""

    store: MessageStore
    machine: int
    num: int
    signer: MessageSigner
    """Signs every message for its key."""
    is_lost: Callable[[], bool] = lambda: False
    """Whether a machine is lost, so that waiting is useless."""

    def send(self, key: str, values: Mapping[str, Any]) -> None:
        """Publish values under a key."""
        self.store.set(f"doctor/{key}", self.signer.sign(f"doctor/{key}", values))

    def receive(self, key: str, read: Callable[[dict[str, Any]], T], seconds: float = ANSWER_SECONDS) -> T | None:
        """The message under a key, converted by `read`; None if there is none in time.

        Polls, since a blocking wait in the store could not be ended.
        """
        deadline = time.monotonic() + seconds
        while not self.store.check([f"doctor/{key}"]):
            if time.monotonic() > deadline or self.is_lost():
                return None
            time.sleep(POLL_SECONDS)
        return self._understood(key, self.store.get(f"doctor/{key}"), read)

    def _understood(self, key: str, text: bytes, read: Callable[[dict[str, Any]], T]) -> T:
        try:
            values = self.signer.verify(f"doctor/{key}", text)
            if values is None:
                raise BadMessage(FORGED)
            return read(values)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            why = f"a message from another machine is not understood here ({key}: {type(error).__name__}: {error})"
            raise BadMessage(why[:MAX_TEXT_CHARS]) from error

    def seconds_behind(self) -> float | None:
        """How far this machine's clock is behind the first one's, which answers each machine in turn."""
        if self.machine:
            return self._ask_clock()
        for machine in range(1, self.num):
            if self.receive(f"clock/{machine}/asked", dict) is not None:
                self.send(f"clock/{machine}/answered", {"seconds": time.time()})
        return 0.0

    def _ask_clock(self) -> float | None:
        asked = time.time()
        self.send(f"clock/{self.machine}/asked", {})
        answer = self.receive(f"clock/{self.machine}/answered", lambda values: finite(values["seconds"]))
        # The first machine may answer other machines before; only the time since its answer counts.
        return None if answer is None else answer - max(asked, time.time() - POLL_SECONDS)


FAR_APART_SECONDS = 5.0


@dataclass(frozen=True)
class MachineFacts:
    """One machine's versions, GPUs, interface and clock."""

    name: str
    torch: str
    evenstep: str
    python: str
    gpus: int
    interface: str
    interface_bits_per_second: float
    seconds_behind: float | None
    """Behind the first machine's clock; None if unknown."""
    set_names: str
    """Set variables that may cause failures, separated by spaces."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MachineFacts:
        """Convert what another machine sent."""
        behind = values["seconds_behind"]
        names = ("name", "torch", "evenstep", "python", "interface")
        return cls(
            **{name: str(values[name])[:MOST_NAME] for name in names},
            gpus=int(values["gpus"]),
            interface_bits_per_second=finite(values["interface_bits_per_second"]),
            seconds_behind=None if behind is None else finite(behind),
            set_names=str(values["set_names"])[:MAX_TEXT_CHARS],
        )


def compare(members: Sequence[MachineFacts | None]) -> list[Finding]:
    """Findings about the machines' versions and clocks."""
    there = [one for one in members if one is not None]
    return [
        _same("torch of all", {one.name: one.torch for one in there}, "install the same torch on all machines"),
        _same("evenstep of all", {one.name: one.evenstep for one in there}, "install the same evenstep everywhere"),
        _same("Python of all", {one.name: one.python.rpartition(".")[0] for one in there}, "use the same Python"),
        _clocks(there),
    ]


def _same(name: str, versions: Mapping[str, str], advice: str) -> Finding:
    if len(set(versions.values())) == 1:
        return Finding(name, "good", f"{next(iter(versions.values()))} on {len(versions)} machines", numbers=versions)
    said = ", ".join(f"{machine} {version}" for machine, version in versions.items())
    return Finding(name, "warn", said, advice, versions)


def _clocks(members: Sequence[MachineFacts]) -> Finding:
    behind = {one.name: one.seconds_behind for one in members if one.seconds_behind is not None}
    unknown = [one.name for one in members if one.seconds_behind is None]
    apart = max(behind.values(), default=0.0) - min(behind.values(), default=0.0)
    said = f"{apart:.1f} s apart"
    if apart > FAR_APART_SECONDS:
        late = max(behind, key=lambda name: abs(behind[name]))
        advice = f"set {late}'s clock (NTP, chrony): training works, but the order of events in the logs cannot be told"
        return Finding("clocks", "warn", said, advice, behind)
    if unknown:
        said = f"unknown for {', '.join(unknown)}: the first machine did not answer"
        return Finding("clocks", "warn", said, "run it again, or compare the output of date there", behind)
    return Finding("clocks", "good", said, numbers=behind)


def reference(first: MachineFacts, second: MachineFacts) -> Reference:
    """The nominal speed of the slower interface; a link below the limit of training's own warning is always slow."""
    slower = min(first, second, key=lambda one: one.interface_bits_per_second)
    bits = slower.interface_bits_per_second
    words = f"{slower.interface} of {slower.name} reports {bits / 1e9:g} Gbit/s" if bits else "nominal speed unknown"
    advice = "is it the right network? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another; so does --rendezvous"
    return Reference(words, bits / 8 or None, slow_bytes_per_second=SLOW / 8, slow_advice=advice)


MAX_FINDINGS = 1000


@dataclass(frozen=True)
class MachineReport:
    """What a machine found on itself, and between itself and other machines."""

    own: tuple[Finding, ...]
    pairs: tuple[Finding, ...]


def read_report(values: Mapping[str, Any]) -> MachineReport:
    """Convert another machine's report."""
    own, pairs = ([Finding.from_json(one) for one in values[name][:MAX_FINDINGS]] for name in ("own", "pairs"))
    return MachineReport(tuple(own), tuple(pairs))


def read_verdict(values: Mapping[str, Any]) -> Finding:
    """Convert the first machine's overall verdict."""
    usual = {"name": "all machines", "advice": "", "numbers": {}}
    return Finding.from_json({**usual, "status": values["status"], "said": values["said"]})


def read_ended(values: Mapping[str, Any]) -> Ended:
    """Convert the result of another machine's part of an attempt, which is one process."""
    why, is_late = str(values["why"])[:MAX_TEXT_CHARS], bool(values["is_late"])
    if why:
        return Ended(why=why, is_late=is_late)
    (returned,) = values["returned"]
    rows = [_row(row) for row in returned["rows"]]
    if not rows:
        raise ValueError("no all-reduce was measured")
    return Ended(({"rows": rows, "copy_bytes_per_second": finite(returned["copy_bytes_per_second"])},))


def _row(values: Mapping[str, Any]) -> dict[str, Any]:
    seconds = {name: finite(values[name]) for name in ("median_seconds", "best_seconds")}
    if min(seconds.values()) <= 0:
        raise ValueError(f"{min(seconds.values())} s is no time")
    return {"num_bytes": int(values["num_bytes"]), "is_right": values["is_right"] is True, **seconds}


INTERFACE_NAME = "GLOO_SOCKET_IFNAME"


class DoctorRendezvous(C10dRendezvous):
    """The rendezvous of the doctors, and their access to the first machine's store."""

    _messages: TCPStore

    def next_round(self, num: int, attempt: int, resume: str | None = None) -> RankAssignment | None:
        """Wait for the machines, and connect to the first machine's store."""
        assignment = super().next_round(num, attempt, resume)
        if assignment is not None:
            host, port = assignment.environment["MASTER_ADDR"], int(assignment.environment["MASTER_PORT"])
            self._messages = self._ask(lambda: TCPStore(host, port, is_master=False))
        return assignment

    def set(self, key: str, value: str) -> None:
        """Store a text; raises HeadLost if the first machine is lost, as `get` and `check` do."""
        self._ask(lambda: self._messages.set(key, value))

    def get(self, key: str) -> bytes:
        """A stored text."""
        return self._ask(lambda: self._messages.get(key))

    def check(self, keys: list[str]) -> bool:
        """Whether these keys are set."""
        return self._ask(lambda: self._messages.check(keys))

    def channel(self, assignment: RankAssignment) -> Channel:
        """The channel to the other machines."""
        return Channel(self, assignment.machine, assignment.num_machines, self._signer, self.is_one_lost)

    def is_one_lost(self) -> bool:
        """Whether one of the machines is lost."""
        return self.remote_failure() is not None

    def _head_lost(self) -> HeadLost:
        return HeadLost(f"{self._host}:{self._port} does not answer any more; start the doctor there again, then here")


def examine_together(environment: Mapping[str, str], machines: str, rendezvous: str) -> Examination:
    """Check this machine, then all machines together; the first machine's report has all findings."""
    began = time.monotonic()
    # Without versions: different ones are a finding, not a reason to refuse a machine.
    identity = Identity(socket.gethostname(), {"command": "doctor"})
    backend = DoctorRendezvous(parse_address(rendezvous), parse_machines(machines), identity, None)
    try:
        own: tuple[Finding, ...] = ()
        for event in examine(environment):
            if isinstance(event, Report):
                own = event.findings
            else:
                yield event
        yield CheckStarted(backend.waiting_message() or "waiting for the other machines", 1, 1, is_trial=True)
        # Use the interface that the rendezvous found; the one that the user set may be wrong.
        os.environ.pop(INTERFACE_NAME, None)
        assignment = backend.next_round(1, 1)
        if assignment is None:
            return
        yield CheckStarted(f"all-reduce between {assignment.num_machines} machines", 1, 1, is_trial=True)
        found = _ClusterCheck(backend.channel(assignment), assignment, environment).findings(own)
        yield Report(tuple(found), time.monotonic() - began, is_first=assignment.machine == 0)
    finally:
        backend.close()


class _ClusterCheck:
    """This machine's part in the check of all machines."""

    def __init__(self, channel: Channel, assignment: RankAssignment, environment: Mapping[str, str]) -> None:
        self._assignment = assignment
        self._environment = environment
        self._channel = channel
        self._interface = assignment.environment.get(INTERFACE_NAME, "")

    def findings(self, own: Sequence[Finding]) -> list[Finding]:
        """All findings, on the first machine; on other machines, the overall verdict."""
        try:
            return self._found(own)
        except BadMessage as error:
            # Leave: the other machines notice it, while continuing would make both sides wait.
            wrong = not_understood("other machines", error)
            return [wrong] if self._assignment.machine else [*own, wrong]

    def _found(self, own: Sequence[Finding]) -> list[Finding]:
        channel, me = self._channel, self._assignment.machine
        channel.send(f"member/{me}", asdict(self._member(channel.seconds_behind())))
        members = self._members()
        pairs = self._pairs(members)
        channel.send(f"report/{me}", {"own": [one.to_json() for one in own], "pairs": [one.to_json() for one in pairs]})
        if me:
            verdict = channel.receive("verdict", read_verdict)
            return [verdict or Finding("all machines", "bad", "the first machine has not answered")]
        others, pairs_of_others = self._others(members)
        found = [*own, *others, *compare(members), *pairs, *pairs_of_others]
        channel.send("verdict", {"status": worst(found), "said": "the first machine prints what was found"})
        return found

    def _member(self, seconds_behind: float | None) -> MachineFacts:
        stats = psutil.net_if_stats().get(self._interface)
        suspicious = {name for names in SUSPECTS.values() for name in names}
        return MachineFacts(
            socket.gethostname(),
            torch.__version__,
            evenstep.__version__,
            platform.python_version(),
            num_gpus(),
            self._interface,
            stats.speed * 1e6 if stats is not None else 0.0,
            seconds_behind,
            " ".join(sorted(suspicious & self._environment.keys())),
        )

    def _members(self) -> list[MachineFacts | None]:
        members = [
            self._channel.receive(f"member/{number}", MachineFacts.from_json) for number in range(self._channel.num)
        ]
        names = [one.name for one in members if one is not None]
        return [
            one if one is None or names.count(one.name) == 1 else replace(one, name=f"{one.name} ({number + 1})")
            for number, one in enumerate(members)
        ]

    def _pairs(self, members: Sequence[MachineFacts | None]) -> list[Finding]:
        """Test the pairs that include this machine; the lower of two machines reports."""
        mine = [pair for one in rounds(self._channel.num) for pair in one if self._channel.machine in pair]
        found = []
        for pair in mine:
            first, second = members[pair[0]], members[pair[1]]
            if first is None or second is None:
                continue
            kinds = ("cpu", "cuda:0") if first.gpus and second.gpus else ("cpu",)
            judged = [self._pair(pair, first, second, device) for device in kinds]
            found += judged if self._channel.machine == pair[0] else []
        return found

    def _pair(self, pair: tuple[int, int], first: MachineFacts, second: MachineFacts, device: str) -> Finding:
        back_end = "gloo" if device == "cpu" else "nccl"
        name = f"{first.name} + {second.name}, {back_end}"
        attempts = _Attempts(self, pair, device)
        ended = attempts.make({})
        trial = Trial(name, ended)
        if not is_sound(ended):
            names = f"{first.set_names} {second.set_names}".split()
            to_try = [] if self._channel.is_lost() else remedies(back_end, names, is_between_machines=True)
            if first.interface == second.interface:
                to_try = [with_interface(settings, first.interface) for settings in to_try]
            # Both sides must try the same at the same time, so no time limit applies.
            trial = search(trial, to_try, attempts.make, TimeBudget(math.inf, math.inf))
        return judge(trial, reference(first, second))

    def job(self, where: str, rank: int, device: str, settings: Settings) -> Job:
        """This machine's part of one attempt."""
        usual = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own = {name: value for name, value in self._environment.items() if name == INTERFACE_NAME}
        given = {**self._assignment.environment, **own, **usual, "OMP_NUM_THREADS": "1"}
        # Instead of the user's interface, the one that the rendezvous found.
        without = {name: self._interface if name == INTERFACE_NAME else None for name in settings}
        meant = with_interface({**without, **{n: v for n, v in settings.items() if v is not None}}, self._interface)
        seconds = CPU_SECONDS if device == "cpu" else GPU_SECONDS
        return Job(add_up_between, (where, [device], ALL_BYTES), 1, seconds, meant, [given])

    def _others(self, members: Sequence[MachineFacts | None]) -> tuple[list[Finding], list[Finding]]:
        """What the other machines found on themselves, and between them."""
        found: list[Finding] = []
        pairs: list[Finding] = []
        for number, member in enumerate(members[1:], 1):
            name = member.name if member is not None else f"machine {number + 1}"
            try:
                report = self._channel.receive(f"report/{number}", read_report)
            except BadMessage as error:
                found.append(not_understood(name, error))
                continue
            if report is None:
                found.append(Finding(name, "bad", "sent no report", "is it still running?"))
                continue
            wrong = [one.of(name) for one in report.own if one.status != "good"]
            num, every = len(report.own) - len(wrong), len(report.own)
            found += [Finding(name, "good", f"{num} of {every} checks are good"), *wrong]
            pairs += report.pairs
        return found, pairs

    def try_with(self, job: Job, where: str, partner: int) -> Ended:
        """Run this machine's part, and combine it with the partner's result."""
        channel = self._channel
        channel.send(f"{where}/ready/{channel.machine}", {})
        if channel.receive(f"{where}/ready/{partner}", dict) is None:
            return Ended(why=f"machine {partner + 1} does not answer", is_late=True)
        mine = try_out(job)
        channel.send(f"{where}/ended/{channel.machine}", asdict(mine))
        theirs = channel.receive(f"{where}/ended/{partner}", read_ended)
        if theirs is None:
            return Ended(why=f"machine {partner + 1} does not answer", is_late=True)
        return both(mine, theirs, channel.machine < partner)


def not_understood(name: str, error: BadMessage) -> Finding:
    """The finding for a machine whose messages cannot be used."""
    advice = f"install the same evenstep on all machines; keep strangers out with the same {TOKEN} on all of them"
    return Finding(name, "bad", str(error), advice)


@dataclass
class _Attempts:
    """Attempts of one pair of machines, numbered so that both sides refer to the same one."""

    of: _ClusterCheck
    pair: tuple[int, int]
    device: str
    number: int = 0

    def make(self, settings: Settings) -> Ended:
        """One attempt, on both machines."""
        self.number += 1
        me = self.of._channel.machine
        rank = self.pair.index(me)
        where = f"pair/{self.pair[0]}-{self.pair[1]}/{self.device}/{self.number}"
        return self.of.try_with(self.of.job(where, rank, self.device, settings), where, self.pair[1 - rank])


def both(mine: Ended, theirs: Ended, is_first: bool) -> Ended:
    """The result of an attempt, the same on both sides; a failure explains more than a timeout."""
    sides = (mine, theirs) if is_first else (theirs, mine)
    failed = sorted((one for one in sides if not one.is_well), key=lambda one: one.is_late)
    return replace(failed[0], returned=()) if failed else Ended(sides[0].returned + sides[1].returned)
