"""Network facts of this machine (ports, addresses, interfaces), and the TCPStores that are opened on them."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import psutil

from evenstep.errors import PlanError
from evenstep.private_apis import TCPStore

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 600
HEARTBEAT_SECONDS = 0.5
BACKLOG = 512


def open_store(seconds: float = 300, use_libuv: bool = True) -> TCPStore:
    """A store on a free loopback port.

    torch's default listens on all interfaces, and binds a port that may have been taken meanwhile.
    """
    with socket.create_server((LOOPBACK, 0), backlog=BACKLOG) as listener:
        return TCPStore(
            LOOPBACK,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=listener.detach(),
            use_libuv=use_libuv,
        )


def free_port() -> int:
    """A free port for a program that opens it itself; another program may take it first."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


def call_with_timeout(
    what: Callable[[], T],
    seconds: float | None,
    late: Callable[[], Exception],
    check: Callable[[], None] = lambda: None,
) -> T:
    """Call `what()` in a thread: a call into a store whose machine is gone may never return."""
    done: list[T] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            done.append(what())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds if seconds is not None else HEARTBEAT_SECONDS)
    while seconds is None and thread.is_alive():
        check()
        thread.join(HEARTBEAT_SECONDS)
    if failed:
        raise failed[0]
    if not done:
        raise late()
    return done[0]


def listen_on(address: tuple[str, int]) -> socket.socket:
    """A listening socket, bound to the interface that other machines reach by this name if it is known.

    A name that resolves to loopback here (as Debian's installer sets up) does not show the interface; an address does.
    """
    host, port = address
    outer = sorted((one for one in _addresses(host) if not one.is_loopback), key=lambda one: one.version)
    if outer and str(outer[0]) in _own_addresses():
        own = str(outer[0])
    else:
        own = LOOPBACK if host == "localhost" else host if _is_loopback(host) else ""
    made = socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((own, port))
        # At once: until it listens, a second socket may be bound to the same port.
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _is_loopback(host: str) -> bool:
    """Whether it is a loopback address, not a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_open(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def is_here(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    try:
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise PlanError(f"the name {host!r} is not known here ({error.strerror}); give an address instead") from error
    return bool(wanted & _own_addresses()) or any(one.startswith("127.") for one in wanted)


def _own_addresses() -> set[str]:
    return {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}


def local_address_to(address: tuple[str, int]) -> str | None:
    """This machine's address on the route to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_of(own: str | None) -> str | None:
    """The interface that has this address."""
    found = [name for name, every in psutil.net_if_addrs().items() for one in every if one.address == own]
    return found[0] if found else None


def warnings_about(host: str) -> list[str]:
    if any(address.is_global for address in _addresses(host)):
        return [f"{host} is a public address, and gradients are neither signed nor encrypted; use a private network"]
    return []


def _addresses(host: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of a name; none if it cannot be resolved."""
    try:
        return {ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):
        return set()
