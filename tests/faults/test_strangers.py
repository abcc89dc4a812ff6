"""Two machines train, and a third one on their network, which has no token, tries what it can."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.hosts import why_no_hosts
from tests.faults.test_machines import PORT, Machine, assert_ends, machines, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

SIGNS_A_PICKLE = """
import base64, hashlib, hmac, itertools, json, os, pickle, sys
from datetime import timedelta
from torch.distributed import TCPStore

class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)

def guesses(plan):
    values = {name: str(value) for name, value in plan.items() if value not in (None, False) and name != "devices"}
    task = values.pop("task")
    sure = {name: values.pop(name) for name in ("machines", "rendezvous")}
    for number in range(len(values) + 1):
        for some in itertools.combinations(sorted(values), number):
            given = {**sure, **{name: values[name] for name in some}}
            yield hashlib.sha256(json.dumps([task, dict(sorted(given.items())), None]).encode()).digest()

store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=timedelta(seconds=5))
print("connected", flush=True)
name = store.get("evenstep").decode()
plan = json.loads(store.get(name[:16] + "/plan")[64:])["plan"]
print("has read the plan:", plan["task"], flush=True)
is_right = lambda token: hashlib.sha256(b"name of " + token).hexdigest() == name
token = next(filter(is_right, guesses(plan)))
print("has found the key", flush=True)
state = pickle.dumps(Trap())
signed = base64.b64encode(hmac.digest(token, state, "sha256") + state).decode()
store.set(f"{name[:16]}/torch.rendezvous.{name[:16]}", signed)
print("has signed a pickle", flush=True)
"""
"""What ran code on both machines for as long as the key was a hash of the command, and the store was open."""


@pytest.fixture(autouse=True)
def _needs_hosts() -> None:
    if missing := why_no_hosts():
        pytest.skip(missing)


def attack(stranger: Machine, program: str, *arguments: str) -> str:
    """What the stranger has to say when it has done its worst."""
    process = stranger.host.start([sys.executable, "-c", program, *arguments], cwd=stranger.folder)
    process.wait(timeout=60)
    return stranger.host.said()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_stranger_who_knows_everything_but_the_token_runs_no_code(tmp_path: Path, is_shared: bool) -> None:
    """Fault 26: no token was set, and the machines share a folder, or one was set."""
    token = {"EVENSTEP_TOKEN": ""} if is_shared else {}
    with machines(tmp_path, 3, is_shared=is_shared) as (first, second, stranger):
        for machine in (first, second):
            machine.train(first, "2", "--epochs", "8", STEP_SECONDS="0.1", **token)
        wait_until(lambda: first.has_taken(7))
        said = attack(stranger, SIGNS_A_PICKLE, first.host.address, str(PORT))
        assert "has read the plan" not in said
        assert_ends(first, 0, 60)
        assert_ends(second, 0, 10)
        assert first.is_audited_clean(epochs=8)
        assert not [path for machine in (first, second) for path in machine.folder.rglob("sprung")]


KNOCKS = """
import socket, sys, time
address, ports = sys.argv[1], [int(port) for port in sys.argv[2].split(",")]
words = [bytes(100), b"GET / HTTP/1.1\\r\\n\\r\\n", b"\\x09" + (0x3C85F7CE).to_bytes(4, "little"), b"\\xff" * 5000]
held = []
for number in range(40):
    for port in ports:
        connection = socket.create_connection((address, port), timeout=5)
        connection.sendall(words[number % len(words)])
        held.append(connection)
    time.sleep(0.05)
print("has knocked at", len(ports), "ports", flush=True)
"""


def test_a_stranger_who_knocks_at_every_port_disturbs_nobody(tmp_path: Path) -> None:
    """Fault 27. There is a port for the rendezvous, and one for each rank; each at the interface that is used."""
    with machines(tmp_path, 3) as (first, second, stranger):
        for machine in (first, second):
            machine.train(first, "2", "--epochs", "8", STEP_SECONDS="0.2")
        wait_until(lambda: first.has_taken(7))
        for machine in (first, second):
            outer = [one for one in machine.host.listening() if not one.startswith("127.0.0.1:")]
            assert all(one.startswith(f"{machine.host.address}:") for one in outer), outer
            ports = [one.rpartition(":")[2] for one in outer]
            assert str(PORT) in ports or machine is second
            assert "has knocked" in attack(stranger, KNOCKS, machine.host.address, ",".join(ports))
        assert_ends(first, 0, 60)
        assert_ends(second, 0, 10)
        assert first.is_audited_clean(epochs=8)
