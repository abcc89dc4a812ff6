"""The hosts that fault tests run on are what they claim to be."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.faults.hosts import Host, Names, hosts, why_no_hosts
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SERVE = """
import socket
with socket.create_server(("0.0.0.0", 8000)) as server:
    while True:
        connection, _ = server.accept()
        connection.sendall(b"x" * 1_000_000)
        connection.close()
"""

FETCH = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 8000), timeout=1) as connection:
    num_bytes = 0
    while data := connection.recv(65536):
        num_bytes += len(data)
print(num_bytes, time.monotonic() - began)
"""

# What a worker has to do where a host's own name does not lead to it: take the interface that leads to rank 0.
ADD_UP = """
import os, socket, sys
from datetime import timedelta
import psutil, torch, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as toward_store:
    toward_store.connect((store, 29500))
    own = toward_store.getsockname()[0]
cards = psutil.net_if_addrs().items()
os.environ["GLOO_SOCKET_IFNAME"] = next(card for card, all_of in cards if own in [each.address for each in all_of])
dist.init_process_group("gloo", f"tcp://{store}:29500", timedelta(seconds=10), world_size=2, rank=rank)
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
print("total", total.item())
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _needs_hosts() -> None:
    if missing := why_no_hosts():
        pytest.skip(missing)


def serve(host: Host) -> None:
    host.start([sys.executable, "-c", SERVE])
    wait_until(lambda: host.is_listening(8000))


def fetch(host: Host, server: Host) -> float:
    """Seconds that a megabyte takes from one host to the other."""
    num_bytes, seconds = host.run(sys.executable, "-c", FETCH, server.address).split()
    assert num_bytes == "1000000"
    return float(seconds)


def test_each_host_has_its_own_name_address_and_ports() -> None:
    with hosts(3) as machines:
        assert [machine.run("hostname").strip() for machine in machines] == ["host0", "host1", "host2"]
        assert [machine.address for machine in machines] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
        for machine in machines:
            serve(machine)
        assert all(machine.listening() == {"0.0.0.0:8000"} for machine in machines)
        for machine in machines:
            for other in machines:
                fetch(machine, other)
    assert socket.gethostname() != "host2"


def test_no_host_sees_the_processes_of_another() -> None:
    with hosts(2) as (first, second):
        process = first.start(["sleep", "300"])
        wait_until(lambda: "sleep" in first.run("ps", "-A", "-o", "comm"))
        assert process.inner in first.pids()
        assert "sleep" not in second.run("ps", "-A", "-o", "comm")
        process.terminate()
        assert process.wait(timeout=10) == -15
        assert first.pids() == []


def test_a_cut_host_vanishes_without_a_word_and_comes_back() -> None:
    with hosts(2) as (first, second):
        serve(first)
        fetch(second, first)
        second.cut()
        with pytest.raises(subprocess.CalledProcessError) as failed:
            fetch(second, first)
        assert "TimeoutError" in failed.value.stderr
        second.mend()
        fetch(second, first)


def test_a_capped_host_sends_slowly_until_it_is_uncapped() -> None:
    with hosts(2) as (first, second):
        serve(first)
        first.cap(mbit=8)
        capped = fetch(second, first)
        assert capped > 0.8, "no packet is faster than the cap"
        first.uncap()
        assert fetch(second, first) < capped


TO_AND_FRO = """
import socket, sys, time
if len(sys.argv) == 1:
    with socket.create_server(("0.0.0.0", 8001)) as server:
        connection, _ = server.accept()
        while data := connection.recv(1):
            connection.sendall(data)
else:
    with socket.create_connection((sys.argv[1], 8001), timeout=5) as connection:
        seconds = []
        for _ in range(10):
            began = time.monotonic()
            connection.sendall(b"x")
            connection.recv(1)
            seconds.append(time.monotonic() - began)
    print(min(seconds))
"""


def test_hosts_with_a_delay_are_that_far_apart_and_can_be_capped() -> None:
    if missing := why_no_hosts(are_delayed=True):
        pytest.skip(missing)
    with hosts(3, delay_ms=10) as machines:
        first, second, third = machines
        for machine in machines:
            serve(machine)
        first.start([sys.executable, "-c", TO_AND_FRO])
        wait_until(lambda: first.is_listening(8001))
        assert float(third.run(sys.executable, "-c", TO_AND_FRO, first.address)) >= 0.02
        uncapped = fetch(second, first)
        assert uncapped >= 0.04, "a handshake, and some round trips of slow start"
        first.cap(mbit=8)
        assert fetch(second, first) > max(0.8, uncapped)
        fetch(first, third)
    assert first.switch not in subprocess.check_output(["ip", "netns", "list"], text=True)


def test_addresses_are_chosen_and_two_networks_at_once_may_use_the_same() -> None:
    with hosts(2, ["10.77.5.9", "10.77.5.1"]) as (late, early), hosts(2, ["10.77.5.9", "10.77.5.1"]) as (stranger, _):
        assert early.address < late.address
        serve(late)
        fetch(early, late)
        assert not stranger.listening()


def test_everything_ends_with_the_hosts_even_when_the_test_fails() -> None:
    with pytest.raises(ZeroDivisionError), hosts(1) as (machine,):
        process = machine.start(
            ["sh", "-c", "setsid sleep 300 & trap '' TERM; echo $FRUIT; sleep 300"], env={"FRUIT": "fig"}
        )
        wait_until(lambda: machine.said() == "fig\n" and len(machine.pids()) == 4)
        pids = machine.pids()
        assert {process.pid, process.inner} < set(pids)
        raise ZeroDivisionError
    assert process.returncode == -9
    assert machine.namespace not in subprocess.check_output(["ip", "netns", "list"], text=True)
    assert not [pid for pid in pids if _is_running(pid)]


def test_what_a_killed_test_run_left_is_removed() -> None:
    subprocess.run(["ip", "netns", "add", "evenstep-4194305-0-host0"], check=True)
    with hosts(1):
        assert "evenstep-4194305-" not in subprocess.check_output(["ip", "netns", "list"], text=True)


@pytest.mark.parametrize("names", ["known", "loopback", "foreign", "unknown"])
def test_gloo_adds_up_between_two_hosts_whatever_their_names_lead_to(names: Names) -> None:
    with hosts(2, names=names) as machines:
        store = machines[0].address
        ranks = [
            machine.start([sys.executable, "-c", ADD_UP, str(rank), store]) for rank, machine in enumerate(machines)
        ]
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0], [machine.said() for machine in machines]
        assert all("total 3.0" in machine.said() for machine in machines)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
