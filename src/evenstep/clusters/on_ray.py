"""`evenstep train --on ray`: Ray places one launcher for each device, the launchers make one elastic run of them.

Launchers find each other as pods do, by torchrun's variables. When Ray loses a node, the run continues on the devices
that are left, and takes others in when Ray has found them. When it loses the node of rank 0, which writes the Record,
it starts again from the last checkpoint, for which all nodes need the same folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from evenstep.distributed.preemption import SIGNALS, handling_signals
from evenstep.distributed.worker_process import die_with
from evenstep.errors import STOPPED, BadInput, Preempted
from evenstep.launcher.rendezvous.auth import make_token
from evenstep.launcher.variables import TOKEN, with_variables
from evenstep.plan import parse_devices

POLL_SECONDS = 0.2
LEAVING_SECONDS = 15.0
"""How long launchers may take to end after the first one has."""
NOTICE_SECONDS = 10.0
PLACING_SECONDS = 20.0
"""How long to wait for the last launchers before the run begins without them; they join it later."""


class Polled(NamedTuple):
    """What a launcher has done since it was asked last."""

    code: int | None
    out: bytes
    err: bytes


class RayPlace(NamedTuple):
    """A node of the cluster, and a free port there."""

    node: str
    """Its id."""
    port: int


class RayLauncher:
    """An actor of Ray that runs one launcher, on the device that Ray has reserved for it."""

    def where(self) -> RayPlace:
        with socket.create_server(("", 0)) as free:
            return RayPlace(_ray().get_runtime_context().get_node_id(), free.getsockname()[1])

    def start(self, words: Sequence[str], variables: dict[str, str], folder: str) -> None:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{folder} does not exist on this node; start in a folder that all nodes have")
        self._logs = Path(tempfile.mkdtemp(prefix="evenstep-ray-"))
        self._read = {name: (self._logs / name).open("wb+", buffering=0) for name in ("out", "err")}
        parent = os.getpid()
        with (self._logs / "out").open("ab") as out, (self._logs / "err").open("ab") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "evenstep", "train", *words],
                cwd=folder,
                env=with_variables(variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # Ray kills this process, and not its children, when the run is over or the node is drained.
                preexec_fn=lambda: die_with(parent),
            )

    def poll(self) -> Polled:
        code = self._process.poll()
        return Polled(code, self._read["out"].read(), self._read["err"].read())

    def stop(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._logs, ignore_errors=True)


@dataclass
class Member:
    """One launcher of the run."""

    number: int
    actor: Any
    placed: Any
    """A reference that is ready when Ray has found a place."""
    polled: Any = None
    """A reference to what it has done; None before it is started."""
    code: int | None = None

    @property
    def is_running(self) -> bool:
        return self.polled is not None and self.code is None


def _ray() -> Any:
    """Its types are known only where it is installed."""
    return importlib.import_module("ray")


def train_on_ray(words: Sequence[str], devices: str | None) -> int:
    """Run `evenstep train` with these words, which name the run, and return its exit code."""
    if importlib.util.find_spec("ray") is None:
        raise BadInput("--on ray needs Ray, which is not installed here; pip install 'evenstep[ray]'")
    given = parse_devices(devices or "1")
    with _connected() as ray:
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0 if isinstance(given, int) else given[0].startswith("cuda")
        num = given if isinstance(given, int) else len(given)
        device = "cuda:0" if has_gpus else "cpu"
        bundle = {"CPU": 1, **({"GPU": 1} if has_gpus else {})}
        with _placement(ray, [bundle] * num) as group:
            return _RayRun(ray, group, bundle, [*words, "--devices", device]).carry_out()


@contextmanager
def _connected() -> Iterator[Any]:
    """Ray's cluster: the one that RAY_ADDRESS names or that this machine is part of, else one of this machine alone."""
    ray = _ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        _show("no Ray cluster is running; starting one on this machine")
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _placement(ray: Any, bundles: Sequence[dict[str, int]]) -> Iterator[Any]:
    """Wait until Ray has reserved all of them at once, close together where it can."""
    group = ray.util.placement_group(list(bundles), strategy="PACK")
    try:
        ready, is_shown = group.ready(), False
        with _requested() as stop:
            while not ray.wait([ready], timeout=NOTICE_SECONDS if not is_shown else POLL_SECONDS)[0]:
                if stop:
                    raise KeyboardInterrupt if stop[0] == signal.SIGINT else Preempted("stopped")
                if not is_shown:
                    _show(f"waiting for Ray to find {len(bundles)} devices: {_in_words(bundles[0])} each")
                    is_shown = True
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _in_words(bundle: dict[str, int]) -> str:
    return " and ".join(f"{num} {kind}" for kind, num in bundle.items())


@contextmanager
def _requested() -> Iterator[list[int]]:
    """Signals that request a stop, in the order in which they come."""
    numbers: list[int] = []
    with handling_signals(lambda number, frame: numbers.append(number), (signal.SIGINT, *SIGNALS)):
        yield numbers


class _RayRun:
    """One run, over all launchers that it takes."""

    def __init__(self, ray: Any, group: Any, bundle: dict[str, int], words: Sequence[str]) -> None:
        self._ray = ray
        self._group = group
        self._bundle = bundle
        self._words = list(words)
        self._num = len(group.bundle_specs)
        self._variables = {TOKEN: make_token(), "PET_NPROC_PER_NODE": "1"}
        self._members: dict[int, Member] = {}
        self._head = 0
        """The number of the launcher that starts rank 0."""
        self._more: list[str] = []
        """Words of a start after the first one."""

    def carry_out(self) -> int:
        """Until the launcher of rank 0 has ended; again if its node is lost."""
        with _requested() as stop:
            try:
                while (code := self._attempt(stop)) is None:
                    _show("Ray has lost the node of rank 0; starting again on the others, from the last checkpoint")
                    self._end_all()
                    self._more = ["--resume", "auto"]
                return code
            except self._ray.exceptions.RayTaskError as error:
                raise BadInput(str(error.cause)) from None
            finally:
                self._end_all()

    def _attempt(self, stop: Sequence[int]) -> int | None:
        """The exit code of the run; None if the node of rank 0 is lost."""
        try:
            self._start_all(stop)
            return self._watch(stop)
        except self._ray.exceptions.RayActorError:
            return None

    def _start_all(self, stop: Sequence[int]) -> None:
        """The first one says where the run is; those that Ray has not placed yet follow."""
        self._members = {number: self._place(number) for number in range(self._num)}
        places = self._places(stop)
        here = self._ray.get_runtime_context().get_node_id()
        # Record and checkpoints are best on the node of this command, which is lost with it in any case.
        self._head = min(places, key=lambda number: (places[number].node != here, number))
        where = places[self._head]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        # A run of one device needs no rendezvous.
        machines = f"1:{self._num}" if self._num > 1 else "1"
        self._variables |= {
            "PET_NNODES": machines,
            "PET_MASTER_ADDR": addresses[where.node],
            "PET_MASTER_PORT": str(where.port),
        }
        for number in sorted(places, key=lambda number: number != self._head):
            self._start(self._members[number])

    def _places(self, stop: Sequence[int]) -> dict[int, RayPlace]:
        """Of the launchers that Ray has placed; at least one."""
        found: dict[int, RayPlace] = {}
        deadline = time.monotonic() + PLACING_SECONDS
        while len(found) < self._num and not (found and time.monotonic() > deadline):
            if stop:
                raise KeyboardInterrupt if stop[0] == signal.SIGINT else Preempted("stopped")
            for number in self._members.keys() - found.keys():
                placed = self._members[number].placed
                if self._ray.wait([placed], timeout=0)[0]:
                    found[number] = self._ray.get(placed)
            time.sleep(POLL_SECONDS)
        return found

    def _place(self, number: int) -> Member:
        """In one of the reserved places; Ray finds another one for a place whose node is lost."""
        kinds = importlib.import_module("ray.util.scheduling_strategies")
        strategy = kinds.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        options = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
        actor = self._ray.remote(RayLauncher).options(scheduling_strategy=strategy, **options).remote()
        return Member(number, actor, actor.where.remote())

    def _start(self, member: Member) -> None:
        # Only which one is the first counts.
        rank = (member.number - self._head) % self._num
        variables = {**self._variables, "PET_NODE_RANK": str(rank)}
        self._ray.get(member.actor.start.remote([*self._words, *self._more], variables, os.getcwd()))
        member.polled = member.actor.poll.remote()

    def _watch(self, stop: Sequence[int]) -> int:
        """Until the launcher of rank 0 has ended, or another one has refused the command; raises if it is lost."""
        num_sent = 0
        while True:
            if len(stop) > num_sent:
                if num_sent and stop[-1] == signal.SIGINT:
                    return STOPPED
                num_sent = len(stop)
                self._members[self._head].actor.stop.remote(stop[-1])
            for member in list(self._members.values()):
                try:
                    self._update(member)
                except self._ray.exceptions.RayActorError:
                    if member.number == self._head:
                        raise
                    self._replace(member)
            codes = {number: member.code for number, member in self._members.items()}
            code = codes[self._head]
            if code is not None:
                self._wait_for_others()
                return code
            if BadInput.exit_code in codes.values():
                return BadInput.exit_code
            time.sleep(POLL_SECONDS)

    def _update(self, member: Member) -> None:
        """Start it if Ray has placed it; show what it has printed."""
        awaited = member.polled or member.placed
        if member.code is not None or not self._ray.wait([awaited], timeout=0)[0]:
            return
        found = self._ray.get(awaited)
        if member.polled is None:
            self._start(member)
            return
        member.code = found.code
        is_head = member.number == self._head
        if is_head or found.code == BadInput.exit_code:
            _pass_on(found.err, sys.stderr)
        if is_head:
            _pass_on(found.out, sys.stdout)
        if found.code is None:
            member.polled = member.actor.poll.remote()
        elif not is_head and found.code == 1 and self._members[self._head].is_running:
            # It was cut off from the run, which goes on.
            self._replace(member)

    def _replace(self, member: Member) -> None:
        _show(f"Ray has lost launcher {member.number + 1} of {self._num}; another one joins when Ray has found a place")
        with suppress(Exception):
            self._ray.kill(member.actor)
        self._members[member.number] = self._place(member.number)

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + LEAVING_SECONDS
        while time.monotonic() < deadline and (left := [one for one in self._members.values() if one.is_running]):
            for member in left:
                try:
                    self._update(member)
                except self._ray.exceptions.RayActorError:
                    member.polled = None
            time.sleep(POLL_SECONDS)

    def _end_all(self) -> None:
        for member in self._members.values():
            with suppress(Exception):
                if member.polled is not None:
                    self._ray.get(member.actor.close.remote(), timeout=LEAVING_SECONDS)
            with suppress(Exception):
                self._ray.kill(member.actor)
        self._members = {}


def _pass_on(text: bytes, stream: Any) -> None:
    if text:
        stream.write(text.decode(errors="replace"))
        stream.flush()


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
