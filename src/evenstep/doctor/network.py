"""Loopback, ports and host name: how processes of this machine reach each other."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import psutil

from evenstep.doctor import Finding
from evenstep.launcher.rendezvous.addresses import LOOPBACK, open_store
from evenstep.private_apis import TCPStore

CHUNK_BYTES = 2**20
NUM_CHUNKS = 64
NUM_PINGS = 200
WAIT_SECONDS = 5.0
NAME_SECONDS = 4.0


@dataclass(frozen=True)
class Loopback:
    """The speed of a plain loopback socket: an upper bound for gloo."""

    latency_seconds: float
    bytes_per_second: float


def measure_loopback() -> Loopback:
    """Measure the round trip of a byte and the speed of a stream, between two threads."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        listener.settimeout(WAIT_SECONDS)
        with socket.create_connection(listener.getsockname(), timeout=WAIT_SECONDS) as client:
            server, _ = listener.accept()
            with server:
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    end.settimeout(WAIT_SECONDS)
                echo = threading.Thread(target=_echo, args=(server,), daemon=True)
                echo.start()
                found = Loopback(_ping(client), _stream(client))
                echo.join(WAIT_SECONDS)
    return found


def _ping(client: socket.socket) -> float:
    times = []
    for _ in range(NUM_PINGS):
        began = time.perf_counter()
        client.sendall(b"?")
        client.recv(1)
        times.append((time.perf_counter() - began) / 2)
    return median(times)


def _stream(client: socket.socket) -> float:
    chunk = bytes(CHUNK_BYTES)
    began = time.perf_counter()
    for _ in range(NUM_CHUNKS):
        client.sendall(chunk)
    client.recv(1)
    return NUM_CHUNKS * CHUNK_BYTES / (time.perf_counter() - began)


def _echo(server: socket.socket) -> None:
    for _ in range(NUM_PINGS):
        server.sendall(server.recv(1))
    left, buffer = NUM_CHUNKS * CHUNK_BYTES, memoryview(bytearray(CHUNK_BYTES))
    while left and (num := server.recv_into(buffer)):
        left -= num
    server.sendall(b"!")


def loopback() -> tuple[Finding, Loopback | None]:
    try:
        found = measure_loopback()
    except OSError as error:
        advice = "bring the interface up (ip link set lo up), and allow it in the firewall"
        return Finding("loopback", "bad", f"{LOOPBACK} does not work: {error}", advice), None
    said = f"{found.latency_seconds * 1e6:.0f} us, {found.bytes_per_second / 1e9:.1f} GB/s through a plain socket"
    return Finding("loopback", "good", said, numbers=vars(found)), found


def ports() -> Finding:
    """Whether a TCPStore works on a free port, as `evenstep run` and torchrun need; tries both backends."""
    failed = _try_store(use_libuv=True)
    if failed is None:
        return Finding("ports", "good", "a TCPStore works on a free port")
    if _try_store(use_libuv=False) is None:
        return Finding("ports", "bad", f"no store can be held: {failed}", "set USE_LIBUV=0 (found by trying)")
    advice = "let processes listen on 127.0.0.1: a firewall, a sandbox or a lack of free ports forbids it"
    return Finding("ports", "bad", f"no store can be held: {failed}", advice)


def _try_store(use_libuv: bool) -> str | None:
    """Why it does not work, or None."""
    patience = timedelta(seconds=WAIT_SECONDS)
    try:
        # Not by torch's own socket, which would listen on all interfaces.
        server = open_store(seconds=WAIT_SECONDS, use_libuv=use_libuv)
        client = TCPStore(LOOPBACK, server.port, None, False, patience, False, use_libuv=use_libuv)
        client.set("key", "yes")
        return None if server.get("key") == b"yes" else "what was written to it is not what was read"
    except (RuntimeError, OSError) as error:
        return str(error).splitlines()[0]


def host_name(name: str | None = None) -> Finding:
    """Whether this machine's name resolves to itself; gloo and NCCL rely on it in other programs."""
    name = name or socket.gethostname()
    advice = f"add a line such as `127.0.1.1 {name}` to /etc/hosts"
    try:
        addresses = resolve(name, NAME_SECONDS)
    except OSError as error:
        return Finding("host name", "warn", f"{name} is not known here: {error.strerror or error}", advice)
    own = {address.address for every in psutil.net_if_addrs().values() for address in every}
    foreign = [one for one in addresses if one not in own and not one.startswith("127.")]
    if foreign:
        said = f"{name} resolves to {', '.join(foreign)}, which is not an address of this machine"
        return Finding("host name", "warn", said, f"correct it: {advice}")
    only = ", which is enough here; between machines, evenstep does not use this name" * all(
        one.startswith("127.") or one == "::1" for one in addresses
    )
    return Finding("host name", "good", f"{name} is {', '.join(addresses)}{only}")


def resolve(name: str, seconds: float) -> list[str]:
    """The addresses of a name; OSError if there are none, or no answer within these seconds."""
    found: list[str] = []
    failed: list[OSError] = []

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(info[4][0]) for info in infos))
        except OSError as error:
            failed.append(error)

    # A daemon thread: an unresponsive name server would otherwise delay the end of the program.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise failed[0] if failed else OSError(f"no answer within {seconds:.0f} s")
    return found


def interfaces() -> set[str]:
    return set(psutil.net_if_addrs())
