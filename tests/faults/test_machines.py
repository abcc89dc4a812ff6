"""Several machines as one run: how they meet, what becomes of it when one is lost, comes late or is slow.

Every machine has namespaces of its own for network and processes, and a folder of its own, mounted at the same path on
all of them: what one writes, or has in memory, no other can read.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evenstep.audit import audit
from evenstep.record import Record
from tests.faults.clocks import why_no_clocks, wrong_clock
from tests.faults.hosts import Entered, Host, Names, hosts, why_no_hosts
from tests.fleet import bits_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

PORT = 29400
TOKEN = {"EVENSTEP_TOKEN": "what all machines of a test know"}
IN_ITS_OWN_FOLDER = 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"'

TASK = """
import os, socket, time
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
width = int(os.environ.get("WIDTH", "8"))
calls = 0


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)),
        train=(x, (x.sum(1) > 0).long()),
        valid=(x, (x.sum(1) > 0).long()),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch=6,
        epochs=2,
    )


def loss(model, batch):
    global calls
    calls += 1
    if os.environ.get("FAILS") == socket.gethostname() and calls == 7 and not os.path.exists("failed"):
        open("failed", "w").close()
        raise ValueError("the sky is falling")
    if model.training:
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
    return F.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.fixture(autouse=True)
def _needs_hosts() -> None:
    if missing := why_no_hosts():
        pytest.skip(missing)


@dataclass(frozen=True)
class Machine:
    """A host, its own folder, and the launcher that was started there last."""

    host: Host
    folder: Path
    launchers: list[Entered] = field(default_factory=list)

    @property
    def launcher(self) -> Entered:
        return self.launchers[-1]

    def evenstep(self, *arguments: str, **environment: str) -> None:
        """Start the command on this machine; it has the token of all, unless told otherwise."""
        own = ["sh", "-c", IN_ITS_OWN_FOLDER, "sh", str(self.folder), str(self.folder.parent / "work")]
        command = [*own, sys.executable, "-m", "evenstep", *arguments]
        self.launchers.append(self.host.start(command, env={**TOKEN, **environment}))

    def train(self, head: Machine, machines: str, *more: str, **environment: str) -> None:
        """Start one machine's part of the run `many`."""
        where = ["--machines", machines, "--rendezvous", f"{head.host.address}:{PORT}"]
        self.evenstep("train", "my_task.py", *where, "--audit", "--name", "many", *more, **environment)

    def wait(self, seconds: float) -> int:
        """The exit code of the launcher."""
        try:
            return self.launcher.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host.name} is still at work: {self.host.said()[-3000:]}") from None

    def has_taken(self, step: int, run: str = "many") -> bool:
        record = self.folder / "runs" / run / "record.jsonl"
        assert self.launcher.poll() is None, self.host.said()
        return record.exists() and f'"step": {step},' in record.read_text()

    def weights(self, run: str = "many") -> dict[str, torch.Tensor]:
        return load_file(self.folder / "runs" / run / "checkpoints" / "latest" / "weights.safetensors")

    def is_audited_clean(self, run: str = "many", epochs: int = 2) -> bool:
        found = audit([self.folder / "runs" / run])
        assert found.is_clean, [found.sentence(), *found.problems]
        return (found.repeated, found.missed, found.epochs, found.samples) == (0, 0, epochs, 60 * epochs)


@contextmanager
def machines(
    folder: Path,
    count: int,
    addresses: list[str] | None = None,
    is_shared: bool = False,
    **of_hosts: Any,
) -> Iterator[list[Machine]]:
    """So many machines with the task, and nothing else, in their folders, or in one folder that they share."""
    (folder / "work").mkdir(exist_ok=True)
    with hosts(count, addresses, **of_hosts) as all_hosts:
        made = [Machine(host, folder / ("shared" if is_shared else host.name)) for host in all_hosts]
        for machine in made:
            machine.folder.mkdir(exist_ok=True)
            (machine.folder / "my_task.py").write_text(TASK)
        yield made


def assert_ends(machine: Machine, code: int, seconds: float, *words: str) -> None:
    """A launcher ends in time with this code, says these words, and leaves no process behind."""
    assert machine.wait(seconds) == code, machine.host.said()
    said = machine.host.said()
    assert all(word in said for word in words), said
    assert "Traceback" not in said
    wait_until(lambda: machine.host.pids() == [], seconds=3)


@pytest.mark.parametrize("is_shared", [False, True])
def test_two_machines_learn_what_one_machine_with_two_devices_learns(tmp_path: Path, is_shared: bool) -> None:
    with machines(tmp_path, 3, is_shared=is_shared) as (first, second, alone):
        for machine in (first, second):
            machine.train(first, "2")
        alone.evenstep("train", "my_task.py", "--devices", "2", "--name", "alone")
        for machine in (first, second, alone):
            assert machine.wait(60) == 0, machine.host.said()
        many, one = first.weights(), alone.weights("alone")
        assert all(torch.equal(many[name], one[name]) for name in one)
        assert Record.read(first.folder / "runs/many").losses == Record.read(alone.folder / "runs/alone").losses
        assert first.is_audited_clean()
        assert (second.folder / "runs/many/checkpoints").exists() == is_shared
        assert "this is machine 2" in second.host.said()


NORMED = """
import os, time
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(104, 6, generator=torch.Generator().manual_seed(0))


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 2)),
        train=(x, (x.sum(1) > 0).long()),
        valid=(x, (x.sum(1) > 0).long()),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        batch=32,
        epochs=3,
    )


def loss(model, batch):
    time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
    return F.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_virtual_replicas_have_the_same_bits_on_two_machines_and_on_one_device(tmp_path: Path, strategy: str) -> None:
    options = ["--virtual-replicas", "4", "--clip", "1"]
    with machines(tmp_path, 2) as (first, second):
        for machine in (first, second):
            (machine.folder / "my_task.py").write_text(NORMED)
            machine.train(first, "2", "--strategy", strategy, "--devices", "cpu,cpu", *options)
        assert_ends(first, 0, 100)
        assert_ends(second, 0, 100)
        first.evenstep("train", "my_task.py", "--devices", "cpu", "--name", "alone", *options)
        assert_ends(first, 0, 60)
        many, alone = (bits_of(first.folder / "runs" / name) for name in ("many", "alone"))
    assert many == alone


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_virtual_replicas_keep_their_bits_through_kills_on_two_machines_and_on_one(
    tmp_path: Path, strategy: str
) -> None:
    """60 steps: 2 x 2 devices until a power cut, one device until it is killed, and 2 x 2 devices again."""
    options = ["--virtual-replicas", "4", "--clip", "1", "--epochs", "15"]
    on_four = [*options, "--strategy", strategy, "--devices", "cpu,cpu", "--checkpoint-every", "5"]
    on_one = [*options, "--strategy", "single", "--devices", "cpu", "--checkpoint-every", "5"]
    with machines(tmp_path, 2, is_shared=True) as (first, second):
        (first.folder / "my_task.py").write_text(NORMED)
        where = ["--machines", "2", "--rendezvous", f"{first.host.address}:{PORT}"]
        for machine in (first, second):
            machine.evenstep("train", "my_task.py", *where, "--name", "one", *on_four, STEP_SECONDS="0.03")
        wait_until(lambda: first.has_taken(13, "one"), seconds=60)
        for machine in (first, second):
            machine.host.kill()
        first.evenstep("train", "my_task.py", "--resume", "runs/one", "--name", "two", *on_one, STEP_SECONDS="0.03")
        wait_until(lambda: first.has_taken(32, "two"), seconds=60)
        first.host.kill()
        for machine in (first, second):
            machine.evenstep("train", "my_task.py", *where, "--resume", "runs/two", "--name", "three", *on_four)
        assert_ends(first, 0, 100)
        assert_ends(second, 0, 100)
        first.evenstep("train", "my_task.py", "--name", "alone", *on_one)
        assert_ends(first, 0, 60)
        runs = [first.folder / "runs" / name for name in ("one", "two", "three", "alone")]
        chain, alone = bits_of(runs[2]), bits_of(runs[3])
        steps = [{row.step: row.loss for row in Record.read(run).steps} for run in runs]
    # The last of the three has the losses and evaluations since its checkpoint.
    losses, valid = chain.pop("losses"), chain.pop("valid")
    assert 25 <= len(losses) < 47
    assert (losses, valid) == (alone.pop("losses")[-len(losses) :], alone.pop("valid")[-len(valid) :])
    assert chain == alone
    for found in steps[:3]:
        assert found.items() <= steps[3].items()


def test_each_device_of_all_machines_has_its_share(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as (first, second):
        first.train(first, "2", "--devices", "cpu", "--shares", "3,2,1", "--precision", "fp64")
        second.train(first, "2", "--devices", "cpu,cpu", "--shares", "3,2,1", "--precision", "fp64")
        assert_ends(first, 0, 100)
        assert_ends(second, 0, 100)
        first.evenstep("train", "my_task.py", "--devices", "cpu", "--name", "alone", "--precision", "fp64")
        assert_ends(first, 0, 60)
        many, alone = (Record.read(first.folder / "runs" / name).losses for name in ("many", "alone"))
        assert many == pytest.approx(alone, rel=1e-9)
        assert first.is_audited_clean()


def test_shares_for_another_number_of_devices_are_refused_when_the_machines_have_met(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as (first, second):
        for machine in (first, second):
            machine.train(first, "2", "--devices", "cpu", "--shares", "3,2,1")
        assert_ends(first, 2, 100, "shares are 3,2,1, and there are 2 devices; give a number for each")
        assert second.wait(100) != 0


def test_machines_share_no_memory(tmp_path: Path) -> None:
    """Gradients of ranks of different machines go over the network; those of one machine may be in shared memory."""
    with machines(tmp_path, 2) as (first, second):
        for machine in (first, second):
            machine.train(first, "2", "--epochs", "50", STEP_SECONDS="0.1")
        wait_until(lambda: first.has_taken(3))
        both = [{memory for pid in machine.host.pids() for memory in _memory_files(pid)} for machine in (first, second)]
        assert not both[0] & both[1]
        assert _connections(first.host, second.host)


def _memory_files(pid: int) -> set[str]:
    """The files in memory that a process has mapped, by device and number."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return set(re.findall(r"(?m)^\S+ \S+ \S+ (\S+ \d+)\s+/memfd:", Path(f"/proc/{pid}/maps").read_text()))
    return set()


def _connections(host: Host, other: Host) -> list[str]:
    """What is connected from a host to another, beside its launchers."""
    lines = host.run("ss", "-Htnp", "dst", other.address).splitlines()
    return [line for line in lines if "evenstep-rank" in line]


@pytest.mark.parametrize("names", ["loopback", "foreign", "unknown"])
def test_machines_meet_whatever_their_own_names_resolve_to(tmp_path: Path, names: Names) -> None:
    with machines(tmp_path, 2, names=names) as (first, second):
        for machine in (first, second):
            machine.train(first, "2", "--steps", "3")
        assert_ends(first, 0, 60)
        assert_ends(second, 0, 10)


def test_the_first_machine_may_be_called_by_a_name_that_leads_it_to_itself(tmp_path: Path) -> None:
    """As Debian's installer writes it: others come by an address that the name does not tell the first machine.

    One that sorts after 127.0.0.1: of two processes of gloo's, the one with the later address connects to the other.
    """
    with machines(tmp_path, 2, ["192.168.7.1", "192.168.7.2"], names="loopback") as (first, second):
        for machine in (first, second):
            where = ["--machines", "2", "--rendezvous", f"{first.host.name}:{PORT}"]
            machine.evenstep("train", "my_task.py", *where, "--name", "many", "--steps", "3")
        assert_ends(first, 0, 60, "2 machines, 2 processes")
        assert_ends(second, 0, 10)


@pytest.mark.parametrize(("wrong", "seconds", "after"), [(1, -30, 0), (1, 30, 0), (1, 3600, 12), (0, -3600, 12)])
def test_clocks_may_be_wrong_and_may_jump(tmp_path: Path, wrong: int, seconds: int, after: int) -> None:
    """Fault 30."""
    if missing := why_no_clocks():
        pytest.skip(missing)
    with machines(tmp_path, 2) as both:
        for number, machine in enumerate(both):
            clock = wrong_clock(tmp_path, seconds, after) if number == wrong else {}
            machine.train(both[0], "1:2", "--epochs", "8", STEP_SECONDS="0.2", **clock)
        for machine in both:
            assert_ends(machine, 0, 100, "2 machines, 2 processes")
            assert "lost" not in machine.host.said()
        assert both[0].is_audited_clean(epochs=8)


def test_a_machine_may_bring_more_devices_than_the_first(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as (first, second):
        first.train(first, "2", "--devices", "1")
        second.train(first, "2", "--devices", "2")
        assert_ends(first, 0, 60, "2 machines, 3 processes; this is machine 1")
        assert_ends(second, 0, 10, "2 machines, 3 processes; this is machine 2")
        assert first.is_audited_clean()
        assert {path.name for path in (second.folder / "runs/many/logs").glob("*.out")} == {"rank1.out", "rank2.out"}


@pytest.mark.smoke
def test_a_machine_whose_cable_is_pulled_is_left_behind(tmp_path: Path) -> None:
    """Fault 22."""
    with machines(tmp_path, 2) as (first, second):
        for machine in (first, second):
            machine.train(first, "1:2", "--checkpoint-every", "5", STEP_SECONDS="0.1")
        wait_until(lambda: first.has_taken(7))
        second.host.cut()
        assert_ends(second, 1, 20, f"{first.host.address}:{PORT} does not answer", "--resume")
        assert_ends(first, 0, 60, "machine host1 is lost", "continuing from step-")
        assert first.is_audited_clean()


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_losing_the_first_machine_ends_the_run_with_a_clear_error(tmp_path: Path, how: str) -> None:
    """Fault 22."""
    with machines(tmp_path, 2) as (first, second):
        for machine in (first, second):
            machine.train(first, "1:2", "--epochs", "50", STEP_SECONDS="0.1")
        wait_until(lambda: first.has_taken(7))
        if how == "killed":
            first.host.kill()
        else:
            first.host.cut()
        assert_ends(second, 1, 20, f"{first.host.address}:{PORT} does not answer", "cannot continue without it")


def test_a_machine_that_dies_with_its_cable_in_is_left_behind_too(tmp_path: Path) -> None:
    """Connections end at once, and the ranks here fail of it: that is no failure of theirs."""
    with machines(tmp_path, 2) as (first, second):
        for machine in (first, second):
            machine.train(first, "1:2", "--checkpoint-every", "5", STEP_SECONDS="0.1")
        wait_until(lambda: first.has_taken(7))
        second.host.kill()
        assert_ends(first, 0, 60, "machine host1 is lost", "continuing from step-")
        assert first.is_audited_clean()


@pytest.mark.parametrize("address", ["10.77.0.1", "10.77.9.9"])
def test_a_machine_that_comes_late_is_taken_in_wherever_its_address_sorts(tmp_path: Path, address: str) -> None:
    """Fault 23."""
    with machines(tmp_path, 3, ["10.77.5.1", "10.77.5.2", address]) as (first, second, late):
        for machine in (first, second):
            machine.train(first, "2:3", "--epochs", "20", STEP_SECONDS="0.05")
        wait_until(lambda: first.has_taken(7))
        late.train(first, "2:3", "--epochs", "20", STEP_SECONDS="0.05")
        assert_ends(first, 0, 100, "another machine joined", "3 machines, 3 processes; this is machine 1")
        assert_ends(second, 0, 10)
        assert_ends(late, 0, 10, "3 machines, 3 processes; this is machine 3")
        assert first.is_audited_clean(epochs=20)
        assert len(Record.read(first.folder / "runs/many").restarts) == 1
        logs = first.folder / "runs/many/logs"
        assert (logs / "rank0.out").exists()
        assert (logs / "restart1/rank0.out").exists()


def test_a_machine_too_many_waits_and_ends_with_the_run(tmp_path: Path) -> None:
    """Fault 23."""
    with machines(tmp_path, 3) as (first, second, spare):
        for machine in (first, second):
            machine.train(first, "1:2", "--epochs", "8", STEP_SECONDS="0.1")
        wait_until(lambda: first.has_taken(7))
        spare.train(first, "1:2", "--epochs", "8", STEP_SECONDS="0.1")
        assert_ends(first, 0, 60)
        assert_ends(second, 0, 10)
        assert_ends(spare, 0, 20, "waiting", "the run ended without this machine")
        assert Record.read(first.folder / "runs/many").restarts == []


def test_a_spare_machine_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    with machines(tmp_path, 3) as (first, second, spare):
        for machine in (first, second):
            machine.train(first, "2", "--epochs", "20", "--checkpoint-every", "5", STEP_SECONDS="0.05")
        wait_until(lambda: first.has_taken(7))
        spare.train(first, "2", "--epochs", "20", "--checkpoint-every", "5", STEP_SECONDS="0.05")
        wait_until(lambda: "waiting" in spare.host.said())
        second.host.cut()
        assert_ends(first, 0, 100, "machine host1 is lost")
        assert_ends(spare, 0, 10, "2 machines, 2 processes; this is machine 2")
        assert first.is_audited_clean(epochs=20)


def test_two_machines_lose_one_go_on_and_take_a_third_one_in(tmp_path: Path) -> None:
    """The whole story: every sample is used exactly once an epoch through all of it."""
    with machines(tmp_path, 3, ["10.77.5.1", "10.77.5.2", "10.77.0.1"]) as (first, second, third):
        more = ["--epochs", "30", "--checkpoint-every", "5"]
        for machine in (first, second):
            machine.train(first, "1:3", *more, STEP_SECONDS="0.05")
        wait_until(lambda: first.has_taken(17))
        second.host.cut()
        assert_ends(second, 1, 20, "does not answer")
        wait_until(lambda: "continuing from step-" in first.host.said(), 30)
        wait_until(lambda: first.has_taken(60))
        third.train(first, "1:3", *more, STEP_SECONDS="0.05")
        assert_ends(first, 0, 100, "machine host1 is lost", "another machine joined")
        assert_ends(third, 0, 10, "2 machines, 2 processes; this is machine 2")
        assert first.is_audited_clean(epochs=30)
        assert [step.step for step in Record.read(first.folder / "runs/many").steps] == list(range(1, 301))


STRANGER = """
import socket
listener = socket.create_server(("0.0.0.0", 29400))
while True:
    listener.accept()[0].sendall(b"220 ready")
"""


def test_a_port_that_a_stranger_holds_is_named_at_once(tmp_path: Path) -> None:
    """Fault 21. One that never says a word may be a busy launcher: tests/pure/test_rendezvous.py."""
    with machines(tmp_path, 2) as (first, second):
        first.host.start([sys.executable, "-c", STRANGER], log=tmp_path / "stranger.log")
        wait_until(lambda: first.host.is_listening(PORT))
        for machine in (first, second):
            machine.train(first, "2")
        assert first.wait(30) == 2
        assert f"port {PORT} cannot be used (Address already in use); another program holds it" in first.host.said()
        assert_ends(second, 2, 20, f"{first.host.address}:{PORT} is used by another program")


@pytest.mark.parametrize("difference", ["task", "token", "nothing"])
def test_runs_never_merge(tmp_path: Path, difference: str) -> None:
    """Faults 21 and 28. Another run of ours holds the port, with another command, or with another token, or none."""
    with machines(tmp_path, 3) as (first, second, third):
        first.train(first, "1:3", "--epochs", "50", STEP_SECONDS="0.1")
        wait_until(lambda: first.has_taken(3))
        tokens = {"task": TOKEN["EVENSTEP_TOKEN"], "token": "that of another run of ours", "nothing": ""}
        # Its first machine is the same one; it has a folder of its own there.
        rival = Machine(first.host, third.folder)
        for machine in (rival, second):
            epochs = "60" if difference == "task" else "50"
            machine.train(first, "1:3", "--epochs", epochs, EVENSTEP_TOKEN=tokens[difference])
        assert rival.wait(30) == 2
        assert f"port {PORT} cannot be used" in first.host.said()
        assert "another run of evenstep holds it; choose another port" in first.host.said()
        why = {
            "task": "epochs is 60 on host1 and 50 on host0",
            "token": f"the run at {first.host.address}:{PORT} has another token",
            "nothing": "and none is set; give it to this machine as EVENSTEP_TOKEN",
        }
        assert_ends(second, 2, 30, why[difference])
        wait_until(lambda: ("host1 was refused" in first.host.said()) == (difference == "task"))
        assert first.launcher.poll() is None
        assert "another machine joined" not in first.host.said()


def test_a_machine_with_an_older_source_is_refused_until_it_has_the_same(tmp_path: Path) -> None:
    """Fault 29."""
    with machines(tmp_path, 2) as (first, second):
        for machine in (first, second):
            (machine.folder / "my_task.py").write_text(f"import helper\n{TASK}")
            (machine.folder / "helper.py").write_text("rate = 0.1\n")
        (second.folder / "helper.py").write_text("rate = 0.2\n")
        for machine in (first, second):
            machine.train(first, "2", "--steps", "3")
        assert_ends(second, 2, 60, "the source of helper is ", " on host1 and ")
        (second.folder / "helper.py").write_text("rate = 0.1\n")
        second.train(first, "2", "--steps", "3")
        assert_ends(first, 0, 60, "host1 was refused: the source of helper is ", "2 machines, 2 processes")
        assert_ends(second, 0, 10)


def test_a_slow_rank_is_named_with_the_reason(tmp_path: Path) -> None:
    """Fault 24."""
    with machines(tmp_path, 2) as (first, second):
        first.train(first, "2", "--steps", "12")
        second.train(first, "2", "--steps", "12", STEP_SECONDS="0.2")
        assert_ends(first, 0, 60)
        assert_ends(second, 0, 10)
        (said,) = [line for line in first.host.said().splitlines() if "is slow" in line]
        assert said.startswith("rank 1 is slow: ")
        assert "ms late in every step, due to compute" in said


def test_a_rank_whose_link_is_slow_is_named_with_the_reason(tmp_path: Path) -> None:
    """Fault 24. A model of 3 MB over 20 Mbit/s: more than a second for each step."""
    with machines(tmp_path, 2) as (first, second):
        second.host.cap(mbit=20)
        for machine in (first, second):
            machine.train(first, "2", "--steps", "12", WIDTH="100000")
        assert_ends(first, 0, 100)
        assert_ends(second, 0, 10)
        (said,) = [line for line in first.host.said().splitlines() if "slow" in line]
        assert said.startswith("rank 1 sends slowly: ")
        assert said.endswith("(network)")


@pytest.mark.timeout(600)
def test_clean_runs_raise_no_alarm(tmp_path: Path) -> None:
    """Fault 24."""
    with machines(tmp_path, 2) as (first, second):
        for number in range(20):
            for machine in (first, second):
                machine.train(first, "2", "--steps", "32", "--name", f"clean{number}")
            assert_ends(first, 0, 60)
            assert_ends(second, 0, 10)
        assert "slow" not in first.host.said()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_machines_tell_what_failed_on_one(tmp_path: Path, rank: int, is_shared: bool) -> None:
    with machines(tmp_path, 2, is_shared=is_shared) as both:
        for machine in both:
            machine.train(both[0], "2", FAILS=f"host{rank}")
        for machine in both:
            headline = f"rank {rank} failed at step 7, in forward on host{rank}"
            line = 'in loss: raise ValueError("the sky is falling")'
            assert_ends(machine, 1, 60, headline, "my_task.py:", line, "ValueError: the sky is falling")
            assert len(machine.host.said().partition("error: ")[2].splitlines()) <= 15


def test_both_machines_go_on_after_a_failure_on_the_second(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as (first, second):
        for machine in (first, second):
            machine.train(first, "2", "--restarts", "1", "--checkpoint-every", "5", FAILS="host1")
        assert_ends(first, 0, 60, "rank 1 failed at step 7, in forward on host1", "restart 1 of 1, from step-00000005")
        assert_ends(second, 0, 10, "rank 1 failed at step 7", "restart 1 of 1")
        assert first.is_audited_clean()


@pytest.mark.parametrize(("asked", "num_after"), [(0, 1), (1, 2)])
def test_all_machines_stop_at_one_step_when_one_is_asked_to_and_go_on_later(
    tmp_path: Path, asked: int, num_after: int
) -> None:
    with machines(tmp_path, 2) as both:
        first, second = both
        for machine in both:
            machine.train(first, "2", "--epochs", "4", STEP_SECONDS="0.1")
        wait_until(lambda: first.has_taken(7))
        both[asked].launcher.send_signal(signal.SIGTERM)
        assert_ends(first, 75, 20, "stopped; continue from step-", "--resume runs/many")
        assert_ends(second, 75, 10, "stopped; the checkpoints are on the first machine")
        steps = len(Record.read(first.folder / "runs/many").steps)
        assert 7 <= steps < 40
        where = ["--machines", "2", "--rendezvous", f"{first.host.address}:{PORT}"] if num_after == 2 else []
        for machine in both[:num_after]:
            # The second machine has no checkpoint: it is sent one.
            machine.evenstep("train", "my_task.py", "--resume", "runs/many", "--audit", "--name", "later", *where)
        for machine in both[:num_after]:
            assert_ends(machine, 0, 60)
        assert [step.step for step in Record.read(first.folder / "runs/later").steps] == list(range(steps + 1, 41))
        found = audit([first.folder / "runs/many", first.folder / "runs/later"])
        assert found.is_clean
        assert found.samples == 240


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_machine_that_waits_for_others_can_be_stopped(tmp_path: Path, number: int) -> None:
    with machines(tmp_path, 1) as (first,):
        first.train(first, "2")
        wait_until(lambda: "waiting for machines" in first.host.said())
        time.sleep(1)
        first.launcher.send_signal(number)
        assert_ends(first, 130 if number == signal.SIGINT else 75, 5)


def test_a_second_machine_hears_why_the_first_one_refuses(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as (first, second):
        second.train(first, "2", "--batch", "1")
        time.sleep(3)
        first.train(first, "2", "--batch", "1")
        assert_ends(first, 2, 20, "a global batch of 1 is too small for 2 machines")
        assert_ends(second, 2, 10, "a global batch of 1 is too small for 2 machines")


def test_a_stall_on_the_second_machine_is_explained_on_the_first(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as (first, second):
        for machine in (first, second):
            machine.train(first, "2", "--epochs", "50", "--stall-after", "3", STEP_SECONDS="0.1")
        wait_until(lambda: first.has_taken(7))
        (rank,) = [pid for pid in second.host.pids() if _name_of(pid) == "evenstep-rank1"]
        os.kill(rank, signal.SIGSTOP)
        for machine in (first, second):
            assert_ends(machine, 124, 20, "rank 1 is stopped (SIGSTOP) at step ", " on host1")


def _name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
