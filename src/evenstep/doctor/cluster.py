"""The doctor on several machines: compare their versions and clocks, and run an all-reduce between every two of them.

The same command runs on each machine. They exchange signed messages through the first machine's store; a message that
does not have its declared type is refused.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Annotated, Any, TypedDict, TypeVar

import msgspec
import psutil
import torch
from msgspec import Meta

import evenstep
from evenstep.doctor import MAX_TEXT_CHARS, Finding, worst
from evenstep.doctor.bandwidth import ALL_BYTES, CPU_SECONDS, GPU_SECONDS, add_up_between, rounds
from evenstep.doctor.checks import CheckStarted, Examination, Report, examine, expected
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
from evenstep.launcher.rendezvous.auth import FORGED, MessageSigner
from evenstep.launcher.rendezvous.elastic import C10dRendezvous, HeadLost
from evenstep.launcher.rendezvous.rank_assignment import RankAssignment
from evenstep.launcher.rendezvous.version_check import Identity
from evenstep.launcher.variables import TOKEN
from evenstep.monitor.stragglers import SLOW
from evenstep.plan import parse_address, parse_machines
from evenstep.private_apis import Store, TCPStore
from evenstep.typed_values import Natural

T = TypeVar("T")
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
POLL_SECONDS = 0.005
ANSWER_SECONDS = 1800.0
"""The longest wait for a message; a lost machine is detected within seconds."""
FAR_APART_SECONDS = 5.0
INTERFACE_NAME = "GLOO_SOCKET_IFNAME"


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
        found = ClusterCheck(backend.channel(assignment), assignment, environment).findings(own)
        yield Report(tuple(found), time.monotonic() - began, is_first=assignment.machine == 0)
    finally:
        backend.close()


class DoctorRendezvous(C10dRendezvous):
    def channel(self, assignment: RankAssignment) -> MachineChannel:
        """The channel to the other machines, through the first machine's store."""
        host, port = assignment.environment["MASTER_ADDR"], int(assignment.environment["MASTER_PORT"])
        store = self._ask(lambda: TCPStore(host, port, is_master=False))
        return MachineChannel(
            store, assignment.machine, assignment.num_machines, self._signer, self._is_one_lost, self._ask
        )

    def _is_one_lost(self) -> bool:
        return self.remote_failure() is not None

    def _head_lost(self) -> HeadLost:
        return HeadLost(f"{self._host}:{self._port} does not answer any more; start the doctor there again, then here")


class BadMessage(TrainingError):
    """A message that cannot be read, or is not signed by a machine of this run."""


@dataclass(frozen=True)
class MachineChannel:
    """Signed messages between this machine and the others."""

    store: Store
    machine: int
    num: int
    signer: MessageSigner
    """Signs every message for its key."""
    is_lost: Callable[[], bool] = lambda: False
    """Whether a machine is lost, so that waiting is useless."""
    ask: Callable[[Callable[[], Any]], Any] = lambda call: call()
    """Calls the store; raises HeadLost if the first machine is lost."""

    def exchange(self, key: str, values: Mapping[str, Any], kind: type[T], machines: Sequence[int]) -> list[T | None]:
        """What each of these machines sends under the same key; None for one that is lost. Each of them calls this."""
        self.send(f"{key}/{self.machine}", values)
        return [self.receive(f"{key}/{machine}", kind) for machine in machines]

    def send(self, key: str, values: Mapping[str, Any]) -> None:
        text = self.signer.sign(f"doctor/{key}", values)
        self.ask(lambda: self.store.set(f"doctor/{key}", text))

    def receive(self, key: str, kind: type[T], seconds: float = ANSWER_SECONDS) -> T | None:
        """The message under a key, of this type; None if there is none in time.

        Polls, since a blocking wait in the store could not be ended.
        """
        deadline = time.monotonic() + seconds
        while not self.ask(lambda: self.store.check([f"doctor/{key}"])):
            if time.monotonic() > deadline or self.is_lost():
                return None
            time.sleep(POLL_SECONDS)
        values = self.signer.verify(f"doctor/{key}", self.ask(lambda: self.store.get(f"doctor/{key}")))
        if values is None:
            raise BadMessage(FORGED)
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            why = f"a message from another machine is not understood here ({key}: {error})"
            raise BadMessage(why[:MAX_TEXT_CHARS]) from error


@dataclass(frozen=True)
class MachineFacts:
    """One machine's versions, GPUs, interface and clock."""

    name: str
    torch: str
    evenstep: str
    python: str
    gpus: Natural
    interface: str
    interface_bits_per_second: Finite
    clock_seconds: Finite
    """The time there, read at the same moment on all machines."""
    set_names: str
    """Set variables that may cause failures, separated by spaces."""


def compare(members: Sequence[MachineFacts | None]) -> list[Finding]:
    there = [one for one in members if one is not None]
    return [
        _same("torch of all", {one.name: one.torch for one in there}, "install the same torch on all machines"),
        _same("evenstep of all", {one.name: one.evenstep for one in there}, "install the same evenstep everywhere"),
        _same("Python of all", {one.name: one.python.rpartition(".")[0] for one in there}, "use the same Python"),
        _clocks({one.name: there[0].clock_seconds - one.clock_seconds for one in there}),
    ]


def _same(name: str, versions: Mapping[str, str], advice: str) -> Finding:
    if len(set(versions.values())) == 1:
        return Finding(name, "good", f"{next(iter(versions.values()))} on {len(versions)} machines", numbers=versions)
    said = ", ".join(f"{machine} {version}" for machine, version in versions.items())
    return Finding(name, "warn", said, advice, versions)


def _clocks(behind: Mapping[str, float]) -> Finding:
    """From how many seconds each clock is behind the first machine's."""
    apart = max(behind.values(), default=0.0) - min(behind.values(), default=0.0)
    said = f"{apart:.1f} s apart"
    if apart <= FAR_APART_SECONDS:
        return Finding("clocks", "good", said, numbers=behind)
    late = max(behind, key=lambda name: abs(behind[name]))
    advice = f"set {late}'s clock (NTP, chrony): training works, but the logs cannot show the order of events"
    return Finding("clocks", "warn", said, advice, behind)


def reference(first: MachineFacts, second: MachineFacts) -> Reference:
    """The nominal speed of the slower interface; a link below the limit of training's own warning is always slow."""
    slower = min(first, second, key=lambda one: one.interface_bits_per_second)
    bits = slower.interface_bits_per_second
    words = f"{slower.interface} of {slower.name} reports {bits / 1e9:g} Gbit/s" if bits else "nominal speed unknown"
    advice = "is it the right network? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another; so does --rendezvous"
    return Reference(words, bits / 8 or None, slow_bytes_per_second=SLOW / 8, slow_advice=advice)


@dataclass(frozen=True)
class MachineReport:
    """What a machine found on itself, and between itself and other machines."""

    own: list[Finding]
    pairs: list[Finding]


class MeasuredSize(TypedDict):
    """The all-reduces of one size."""

    num_bytes: Natural
    is_right: bool
    median_seconds: Seconds
    best_seconds: Seconds


class MeasuredPair(TypedDict):
    """What one process of a pair measured."""

    rows: Annotated[list[MeasuredSize], Meta(min_length=1)]
    copy_bytes_per_second: Finite


@dataclass(frozen=True)
class SideEnded:
    """One machine's part of an attempt: an `Ended` whose values are checked."""

    why: str
    is_late: bool
    returned: list[MeasuredPair]


@dataclass(frozen=True)
class ClusterCheck:
    """This machine's part in the check of all machines."""

    channel: MachineChannel
    assignment: RankAssignment
    environment: Mapping[str, str]

    @property
    def _interface(self) -> str:
        return self.assignment.environment.get(INTERFACE_NAME, "")

    def findings(self, own: Sequence[Finding]) -> list[Finding]:
        """All findings, on the first machine; on other machines, the overall verdict."""
        try:
            found = self._found(own)
        except BadMessage as error:
            # Leave: the other machines notice it, while continuing would make both sides wait.
            wrong = not_understood("other machines", error)
            return [wrong] if self.channel.machine else [*own, wrong]
        verdict = Finding("all machines", worst(found), "the first machine prints what was found")
        return [verdict] if self.channel.machine else found

    def _found(self, own: Sequence[Finding]) -> list[Finding]:
        channel, every = self.channel, range(self.channel.num)
        channel.exchange("ready", {}, dict, every)
        members = _distinct(channel.exchange("member", asdict(self._facts(time.time())), MachineFacts, every))
        pairs = self._pairs(members)
        report = {"own": [one.to_json() for one in own], "pairs": [one.to_json() for one in pairs]}
        channel.send(f"report/{channel.machine}", report)
        others, pairs_of_others = self._others(members)
        between = [*pairs, *pairs_of_others]
        devices = sum(max(1, one.gpus) for one in members if one is not None)
        return [
            *own,
            *others,
            *compare(members),
            *between,
            *expected(between, max(2, devices), "scaling, all machines"),
        ]

    def _facts(self, clock_seconds: float) -> MachineFacts:
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
            clock_seconds,
            " ".join(sorted(suspicious & self.environment.keys())),
        )

    def _pairs(self, members: Sequence[MachineFacts | None]) -> list[Finding]:
        """Test the pairs that include this machine; the lower of two machines reports."""
        mine = [pair for one in rounds(self.channel.num) for pair in one if self.channel.machine in pair]
        found = []
        for pair in mine:
            first, second = members[pair[0]], members[pair[1]]
            if first is None or second is None:
                continue
            kinds = ("cpu", "cuda:0") if first.gpus and second.gpus else ("cpu",)
            judged = [self._pair(pair, first, second, device) for device in kinds]
            found += judged if self.channel.machine == pair[0] else []
        return found

    def _pair(self, pair: tuple[int, int], first: MachineFacts, second: MachineFacts, device: str) -> Finding:
        back_end = "gloo" if device == "cpu" else "nccl"
        # Numbered, so that both sides refer to the same attempt.
        numbers = count(1)

        def attempt(settings: Settings) -> Ended:
            return self._attempt(pair, f"pair/{pair[0]}-{pair[1]}/{device}/{next(numbers)}", device, settings)

        trial = Trial(f"{first.name} + {second.name}, {back_end}", attempt({}))
        if not is_sound(trial.ended):
            names = f"{first.set_names} {second.set_names}".split()
            to_try = [] if self.channel.is_lost() else remedies(back_end, names, is_between_machines=True)
            if first.interface == second.interface:
                to_try = [with_interface(settings, first.interface) for settings in to_try]
            # Both sides must try the same at the same time, so no time limit applies.
            trial = search(trial, to_try, attempt, TimeBudget(math.inf, math.inf))
        return judge(trial, reference(first, second))

    def _attempt(self, pair: tuple[int, int], where: str, device: str, settings: Settings) -> Ended:
        """Run this machine's part, and combine it with the other machine's result."""
        channel = self.channel
        rank = pair.index(channel.machine)
        lost = Ended(why=f"machine {pair[1 - rank] + 1} does not answer", is_late=True)
        if None in channel.exchange(f"{where}/ready", {}, dict, pair):
            return lost
        mine = try_out(self._job(where, rank, device, settings))
        first, second = channel.exchange(f"{where}/ended", asdict(mine), SideEnded, pair)
        return both(first, second) if first is not None and second is not None else lost

    def _job(self, where: str, rank: int, device: str, settings: Settings) -> Job:
        usual = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own = {name: value for name, value in self.environment.items() if name == INTERFACE_NAME}
        given = {**self.assignment.environment, **own, **usual, "OMP_NUM_THREADS": "1"}
        # Instead of the user's interface, the one that the rendezvous found.
        without = {name: self._interface if name == INTERFACE_NAME else None for name in settings}
        meant = with_interface({**without, **{n: v for n, v in settings.items() if v is not None}}, self._interface)
        seconds = CPU_SECONDS if device == "cpu" else GPU_SECONDS
        return Job(add_up_between, (where, [device], ALL_BYTES), 1, seconds, meant, [given])

    def _others(self, members: Sequence[MachineFacts | None]) -> tuple[list[Finding], list[Finding]]:
        """What the other machines found on themselves, and between them."""
        found: list[Finding] = []
        pairs: list[Finding] = []
        for number, member in enumerate(members):
            if number == self.channel.machine:
                continue
            name = member.name if member is not None else f"machine {number + 1}"
            try:
                report = self.channel.receive(f"report/{number}", MachineReport)
            except BadMessage as error:
                found.append(not_understood(name, error))
                continue
            if report is None:
                found.append(Finding(name, "bad", "sent no report", "is it still running?"))
                continue
            wrong = [replace(one, name=f"{name}: {one.name}") for one in report.own if one.status != "good"]
            num, every = len(report.own) - len(wrong), len(report.own)
            found += [Finding(name, "good", f"{num} of {every} checks are good"), *wrong]
            pairs += report.pairs
        return found, pairs


def _distinct(members: Sequence[MachineFacts | None]) -> list[MachineFacts | None]:
    """With a number behind each name that several machines have."""
    names = [one.name for one in members if one is not None]
    return [
        one if one is None or names.count(one.name) == 1 else replace(one, name=f"{one.name} ({number})")
        for number, one in enumerate(members, 1)
    ]


def not_understood(name: str, error: BadMessage) -> Finding:
    """The finding for a machine whose messages cannot be used."""
    advice = f"install the same evenstep on all machines; keep other programs out with the same {TOKEN} on all of them"
    return Finding(name, "bad", str(error), advice)


def both(first: SideEnded, second: SideEnded) -> Ended:
    """The result of an attempt, the same on both sides; a failure explains more than a timeout."""
    failed = sorted((one for one in (first, second) if one.why), key=lambda one: one.is_late)
    if failed:
        return Ended(why=failed[0].why, is_late=failed[0].is_late)
    returned = (*first.returned, *second.returned)
    return Ended(returned) if len(returned) == 2 else Ended(why="a machine sent no result")
