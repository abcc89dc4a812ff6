"""Two machines train, and a third one on their network, which has no token, tries what it can."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.hosts import why_no_hosts
from tests.faults.test_machines import PORT, Machine, assert_ends, machines
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

SEEKS_A_STORE = """
import base64, json, os, pickle, socket, sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from torch.distributed import TCPStore

address, rendezvous, ports = sys.argv[1], int(sys.argv[2]), [int(port) for port in sys.argv[3].split(",")]

class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)

def attack(port):
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=3))
    except Exception as error:
        return f"{port}: {type(error).__name__}"
    print("is in a store at", port, flush=True)
    plan = store.get("plan")
    print("has read the plan:", plan, flush=True)
    store.set("plan", "0" * 64 + json.dumps({"place": "plan", "turn": 99, "values": {"plan": None, "refused": "me"}}))
    store.set("rendezvous", base64.b64encode(pickle.dumps(Trap())).decode())
    return f"{port}: has written"

# torch is imported by now: who is greeted here finds the stores there, too, if they are open.
with socket.create_connection((address, rendezvous), timeout=10) as gate:
    print("was greeted:", gate.recv(8, socket.MSG_WAITALL).decode(), flush=True)
with ThreadPoolExecutor(len(ports)) as pool:
    print("has tried", *pool.map(attack, ports), flush=True)
"""
"""What ran code on both machines for as long as the store was open, and its key was a hash of the command."""


@pytest.fixture(autouse=True)
def _needs_hosts() -> None:
    if missing := why_no_hosts():
        pytest.skip(missing)


def attack(stranger: Machine, program: str, *arguments: str) -> str:
    """What the stranger has to say when it has done its worst."""
    process = stranger.host.start([sys.executable, "-c", program, *arguments], cwd=stranger.folder)
    process.wait(timeout=90)
    return stranger.host.said()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_stranger_who_knows_everything_but_the_token_runs_no_code(tmp_path: Path, is_shared: bool) -> None:
    """Fault 26: no token was set, and the machines share a folder, or one was set."""
    token = {"EVENSTEP_TOKEN": ""} if is_shared else {}
    with machines(tmp_path, 3, is_shared=is_shared) as (first, second, stranger):
        for machine in (first, second):
            machine.train(first, "2", "--epochs", "8", STEP_SECONDS="0.3", **token)
        wait_until(lambda: first.has_taken(7))
        # All that the first machine listens at, on loopback too: a store that is opened to everyone is among them.
        ports = sorted({one.rpartition(":")[2] for one in first.host.listening()})
        said = attack(stranger, SEEKS_A_STORE, first.host.address, str(PORT), ",".join(ports))
        assert "was greeted: evenstep" in said, "the run was there to be attacked"
        assert "is in a store" not in said
        assert f"{PORT}: " in said, "all ports were tried"
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
