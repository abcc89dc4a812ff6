"""An authenticated tunnel to the first machine's stores: only processes that know the token can connect.

torch's TCPStore lets anyone who reaches it read, write and delete. So stores listen on loopback only, and other
machines reach them through this tunnel: the first machine runs a `TunnelServer` at the address of the rendezvous, and
every other launcher a `TunnelClient`, which opens a loopback port and relays each connection to the server:

    a process -> loopback port -> TunnelClient  =====  network  =====  TunnelServer -> store on loopback

Before any data is relayed, both sides prove that they know the token, for this run and this connection (HMAC over the
run's id and a nonce from each side), without sending it. Everything read before that has a fixed or bounded length.
Then the client sends its machine's identity, and is refused with a reason if it does not match. The relayed data is
neither signed nor encrypted, like all of torch's own traffic.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from evenstep.errors import PlanError
from evenstep.launcher.rendezvous.addresses import LOOPBACK
from evenstep.launcher.rendezvous.auth import (
    MAX_CREDENTIAL_BYTES,
    Reader,
    Session,
    Writer,
    WrongToken,
    run_key,
)
from evenstep.launcher.rendezvous.version_check import Identity
from evenstep.report.terminal import without_control

T = TypeVar("T")
HELLO = b"evenstep rendezvous 1\n"
RUN_BYTES = 16
NONCE_BYTES = 32
ANSWER_SECONDS = 4.0
"""Without an answer for this long, the server is busy and is tried again: a launcher that prepares a run may hold the
GIL for minutes. Shorter than HANDSHAKE_SECONDS, so that a busy server is not mistaken for one that hangs up."""
HANDSHAKE_SECONDS = 8.0
BUSY_SECONDS = 60.0
"""How long a worker's connection is retried."""
RETRY_SECONDS = 0.2
MAX_UNPROVED = 256
"""Unauthenticated connections at a time; more are closed."""
MAX_UNPROVED_PER_ADDRESS = 64
"""Of them from one address, so that a stranger cannot keep machines out; our own machines retry."""
CHUNK = 2**16


class NotEvenstep(PlanError):
    """Another program listens there."""


class AnotherRun(PlanError):
    """A newer run listens at this address."""


class Busy(OSError):
    """The process that listens there does not answer, or has too many connections; it is not yet identified."""


@dataclass(frozen=True)
class Greeting:
    """What a server sends before authentication."""

    run: bytes
    nonce: bytes
    credential: bytes


async def _read_greeting(reader: Reader) -> Greeting | None:
    """Read fields of fixed or bounded length; None if it is not a tunnel server."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            if not await _says_hello(reader):
                return None
            run, nonce = await reader.readexactly(RUN_BYTES), await reader.readexactly(NONCE_BYTES)
            num = int.from_bytes(await reader.readexactly(2), "big")
            return Greeting(run, nonce, await reader.readexactly(num)) if num <= MAX_CREDENTIAL_BYTES else None
    except TimeoutError as error:
        raise Busy(f"no answer for {ANSWER_SECONDS} s") from error


async def _says_hello(reader: Reader) -> bool:
    """Compare byte by byte: another program may send something short, and wait."""
    received = b""
    while len(received) < len(HELLO) and HELLO.startswith(received):
        more = await reader.read(len(HELLO) - len(received))
        if not more:
            break
        received += more
    if not received:
        # As a server with too many connections does.
        raise Busy("the connection was closed before anything was sent")
    return received == HELLO


def credential_of(address: tuple[str, int]) -> bytes:
    """The sealed token that the server offers; empty if it offers none. Raises Busy if it does not answer."""

    async def ask() -> bytes:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*address), HANDSHAKE_SECONDS)
        try:
            greeting = await _read_greeting(reader)
        finally:
            writer.close()
        return greeting.credential if greeting is not None else b""

    return asyncio.run(ask())


@dataclass(frozen=True)
class JoinRequest:
    """What a client sends once it is authenticated."""

    port: int
    """A store's port on the first machine; 0 is the launchers' store."""
    identity: Identity


class _Loop:
    """An event loop in one thread that relays all connections."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def listen(self, listener: socket.socket, serve: Callable[[Reader, Writer], Awaitable[None]]) -> asyncio.Server:

        async def served(reader: Reader, writer: Writer) -> None:
            # What went wrong is the other side's to find out: its connection ends.
            with suppress(OSError, EOFError, TimeoutError, PlanError, ValueError, asyncio.CancelledError):
                await serve(reader, writer)
            writer.close()

        server = self.do(asyncio.start_server(served, sock=listener, backlog=512))
        self._servers.append(server)
        return server

    def stop(self, server: asyncio.Server) -> None:
        """Accept no more connections there; open ones continue."""

        async def close() -> None:
            server.close()

        self._servers.remove(server)
        self.do(close())

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self.do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Sockets are closed in the next iteration of the loop.
        await asyncio.sleep(0)


class TunnelServer:
    """The first machine's end: relays authenticated machines with a matching identity to a store."""

    def __init__(
        self, bound: socket.socket, token: str, identity: Identity, port: int, credential: bytes = b""
    ) -> None:
        self._credential = credential
        """The token, sealed by munge for this user; other users cannot open it."""
        self.run = secrets.token_bytes(RUN_BYTES)
        self.key = run_key(token, self.run)
        self._identity = identity
        self._port = port
        self._of_workers = 0
        self.reached_at = ""
        """The address of this machine that another one connected to."""
        self._unproved: Counter[str] = Counter()
        self._loop = _Loop()
        self._loop.listen(bound, self._serve)

    def close(self) -> None:
        self._loop.close()

    def set_workers_port(self, port: int) -> None:
        """Relay workers to this attempt's store, and no longer to earlier ones."""
        self._of_workers = port

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        port = await self._admit(reader, writer)
        if port is not None:
            await _relay((reader, writer), await asyncio.open_connection(LOOPBACK, port))

    async def _admit(self, reader: Reader, writer: Writer) -> int | None:
        """The port of the store to connect to; None if the machine is refused."""
        whose = str(writer.get_extra_info("peername")[0])
        if self._unproved[whose] >= MAX_UNPROVED_PER_ADDRESS or self._unproved.total() >= MAX_UNPROVED:
            return None
        self._unproved[whose] += 1
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                session = await self._handshake(reader, writer)
        finally:
            self._unproved -= Counter({whose: 1})
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            hello = await session.read("client", reader, JoinRequest)
            refused = self._refusal(hello)
            session.write("server", writer, refused)
            await writer.drain()
        if refused:
            return None
        self.reached_at = str(writer.get_extra_info("sockname")[0])
        return hello.port or self._port

    async def _handshake(self, reader: Reader, writer: Writer) -> Session:
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(HELLO + self.run + nonce + len(self._credential).to_bytes(2, "big") + self._credential)
        theirs = await reader.readexactly(NONCE_BYTES)
        session = Session(self.key, self.run + nonce + theirs)
        # The client first: a stranger gets nothing to test guesses against.
        await session.check("client", reader)
        writer.write(session.proof("server"))
        return session

    def _refusal(self, hello: JoinRequest) -> str:
        if hello.port:
            return "" if hello.port == self._of_workers else "that store is closed"
        why = self._identity.refusal_of(hello.identity)
        if why:
            print(without_control(f"{hello.identity.machine} was refused: {why}"), file=sys.stderr, flush=True)
        return why


class TunnelClient:
    """Another machine's end: loopback ports that lead to the first machine's stores."""

    def __init__(self, address: tuple[str, int], token: str, identity: Identity) -> None:
        self._address = address
        self._token = token
        self._identity = identity
        self.run = b""
        """The id of the run, once it is known."""
        self.key = b""
        self._to_workers: asyncio.Server | None = None
        """The loopback server for the latest attempt's worker store."""
        self._loop = _Loop()

    @property
    def where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def authenticate(self) -> None:
        """Prove that this machine knows the token; raises with the reason if it is refused."""
        self._loop.do(self._authenticate())

    def close(self) -> None:
        self._loop.close()

    def port(self, there: int = 0) -> int:
        """A local loopback port that leads to a store on the first machine."""
        listener = socket.create_server((LOOPBACK, 0))

        async def serve(reader: Reader, writer: Writer) -> None:
            await _relay((reader, writer), await self._connect_when_free(there))

        port = int(listener.getsockname()[1])
        server = self._loop.listen(listener, serve)
        if there:
            if self._to_workers is not None:
                self._loop.stop(self._to_workers)
            self._to_workers = server
        return port

    async def _authenticate(self) -> None:
        _, writer = await self._connect(0)
        writer.close()

    async def _connect_when_free(self, there: int) -> tuple[Reader, Writer]:
        """Retry while the server has too many connections: all workers of a large machine connect at once."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return await self._connect(there)
            except Busy:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _connect(self, there: int) -> tuple[Reader, Writer]:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*self._address), HANDSHAKE_SECONDS)
        try:
            session = await self._handshake(reader, writer)
            session.write("client", writer, JoinRequest(there, self._identity))
            refused = await asyncio.wait_for(session.read("server", reader, str), HANDSHAKE_SECONDS)
            if refused:
                raise PlanError(f"this machine does not match the run at {self.where}: {refused}")
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _handshake(self, reader: Reader, writer: Writer) -> Session:
        greeting = await _read_greeting(reader)
        if greeting is None:
            raise NotEvenstep(f"{self.where} is used by another program; choose another port")
        run, theirs = greeting.run, greeting.nonce
        self._recognize(run)
        nonce = secrets.token_bytes(NONCE_BYTES)
        session = Session(self.key, run + theirs + nonce)
        writer.write(nonce + session.proof("client"))
        try:
            await asyncio.wait_for(session.check("server", reader), ANSWER_SECONDS)
        except (EOFError, ConnectionError, WrongToken) as error:
            raise WrongToken(f"the run at {self.where} has another token") from error
        return session

    def _recognize(self, run: bytes) -> None:
        """Remember the first run found here, and refuse a newer one at the same address."""
        if self.run and run != self.run:
            raise AnotherRun(f"the run at {self.where} has ended, and another one has begun there")
        if not self.run:
            self.run, self.key = run, run_key(self._token, run)


def is_tunnel_server(address: tuple[str, int]) -> bool:
    """Whether a run of evenstep listens there."""
    try:
        with socket.create_connection(address, timeout=2) as connection:
            return connection.recv(len(HELLO), socket.MSG_WAITALL) == HELLO
    except OSError:
        return False


async def _relay(one: tuple[Reader, Writer], other: tuple[Reader, Writer]) -> None:
    """Copy bytes in both directions until either side closes."""
    copies = [asyncio.ensure_future(_copy(one[0], other[1])), asyncio.ensure_future(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        for _, writer in (one, other):
            writer.close()


async def _copy(reader: Reader, writer: Writer) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
