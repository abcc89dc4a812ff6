"""Become part of a run on many machines: host it (`host_run`), or join it with the token (`join_run`)."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from evenstep.errors import PlanError, TrainingError
from evenstep.launcher.rendezvous.addresses import (
    JOIN_SECONDS,
    LOOPBACK,
    call_with_timeout,
    interface_of,
    is_open,
    listen_on,
    local_address_to,
    open_store,
)
from evenstep.launcher.rendezvous.auth import (
    MessageSigner,
    TokenFile,
    WrongToken,
    given_token,
    make_token,
    open_token,
    seal_token,
)
from evenstep.launcher.rendezvous.slurm import find_slurm
from evenstep.launcher.rendezvous.tunnel import (
    RETRY_SECONDS,
    Busy,
    NotEvenstep,
    TunnelClient,
    TunnelServer,
    credential_of,
    is_tunnel_server,
)
from evenstep.launcher.rendezvous.version_check import Identity
from evenstep.launcher.variables import TOKEN, TOKEN_FILE
from evenstep.plan import RUNS
from evenstep.private_apis import TCPStore

HEAD_SECONDS = 300.0
TOKEN_SECONDS = 10.0
"""Counted from when the first machine answers: a network file system may show the token file late."""

Address = tuple[str, int]


@dataclass(frozen=True)
class StoreAccess:
    """A launcher's access to the stores of a run."""

    run: str
    """A fresh id for every run."""
    signer: MessageSigner
    store: TCPStore
    """Of the launchers."""
    tunnel: TunnelServer | TunnelClient
    token_file: TokenFile | None = None

    def open_workers_store(self) -> tuple[TCPStore, int]:
        """A store for the workers of one attempt, on the first machine."""
        assert isinstance(self.tunnel, TunnelServer)
        store = open_store()
        self.tunnel.set_workers_port(store.port)
        return store, int(store.port)

    def port_to(self, port: int) -> int:
        """The local port that leads to a store of the first machine."""
        return port if isinstance(self.tunnel, TunnelServer) else self.tunnel.port(port)

    def interface(self, address: Address) -> str | None:
        """The network interface that connects this machine with the others."""
        own = local_address_to(address)
        if own is not None and own.startswith("127.") and isinstance(self.tunnel, TunnelServer):
            # The first machine's own name may resolve to loopback; use the address that another machine connected to.
            own = self.tunnel.reached_at or own
        return interface_of(own)

    def close(self) -> None:
        if self.token_file is not None:
            # While the port is held: the next run on this port writes a file of the same name.
            self.token_file.remove()
        self.tunnel.close()


def host_run(address: Address, identity: Identity) -> StoreAccess:
    """Listen as the first machine, and make a token if none is set."""
    token = given_token()
    store = open_store(JOIN_SECONDS)
    with _listening(address) as bound:
        if token is not None:
            server = TunnelServer(bound, token, identity, store.port)
            return StoreAccess(server.run.hex(), MessageSigner(server.key), store, server)
        return _host_with_own_token(address, identity, bound, store)


def _host_with_own_token(address: Address, identity: Identity, bound: socket.socket, store: TCPStore) -> StoreAccess:
    token, file, is_slurm = make_token(), TokenFile(Path(RUNS), address), find_slurm() is not None
    # Holding the port gives this process the file named after it; write it before answering any machine.
    file.write(token)
    try:
        credential = seal_token(token) if is_slurm else b""
        server = TunnelServer(bound, token, identity, store.port, credential)
    except BaseException:
        file.remove()
        raise
    if not is_slurm:
        print(file.announcement(token), file=sys.stderr, flush=True)
    return StoreAccess(server.run.hex(), MessageSigner(server.key), store, server, file)


@contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    """The bound port; closed if the block fails."""
    try:
        bound = listen_on(address)
    except OSError as error:
        holder = "another run of evenstep holds it" if is_tunnel_server(address) else "another program holds it"
        why = f"port {address[1]} cannot be used ({os.strerror(error.errno or 0)})"
        raise PlanError(f"{why}; {holder}; choose another port, the same on all machines") from error
    try:
        yield bound
    except BaseException:
        bound.close()
        raise


def join_run(address: Address, identity: Identity) -> StoreAccess:
    """Wait for the first machine, and authenticate with the token."""
    where = f"{address[0]}:{address[1]}"
    deadline = time.monotonic() + HEAD_SECONDS
    token = given_token()
    _wait_for(address, deadline)
    late = time.monotonic() + TOKEN_SECONDS
    is_reported = False
    while True:
        try:
            found = token or _token_of_slurm(address) or TokenFile(Path(RUNS), address).read()
            if found:
                return _access(TunnelClient(address, found, identity), deadline)
        except WrongToken as error:
            # A token from a file may be an earlier run's.
            if token is not None or time.monotonic() > late:
                raise PlanError(f"{error}; {_same_token(address)}") from None
        except (OSError, EOFError) as error:
            # It has closed, or is too busy to answer, or has too many connections for now.
            time.sleep(RETRY_SECONDS)
            if not isinstance(error, Busy):
                _wait_for(address, deadline)
            elif time.monotonic() > deadline:
                raise NotEvenstep(_unresponsive(where)) from error
            elif not is_reported:
                print(f"waiting for {where}, which is busy or is another program: {error}", file=sys.stderr, flush=True)
                is_reported = True
            late = time.monotonic() + TOKEN_SECONDS
            continue
        if time.monotonic() > late:
            raise PlanError(f"{where} requires the run's token, and none is set; {_same_token(address)}")
        time.sleep(RETRY_SECONDS)


def _access(client: TunnelClient, deadline: float) -> StoreAccess:
    """Authenticate, and connect to the launchers' store."""
    try:
        client.authenticate()
        return StoreAccess(client.run.hex(), MessageSigner(client.key), _store_through(client, deadline), client)
    except BaseException:
        client.close()
        raise


def _token_of_slurm(address: Address) -> str | None:
    """The first task's token, if it belongs to the same user."""
    credential = credential_of(address) if find_slurm() is not None else b""
    return open_token(credential) if credential else None


def _store_through(client: TunnelClient, deadline: float) -> TCPStore:
    """Connect within the deadline: torch would retry for the store's own timeout."""
    port = client.port()
    seconds = max(1.0, deadline - time.monotonic())
    limit = timedelta(seconds=JOIN_SECONDS)
    return call_with_timeout(
        lambda: TCPStore(LOOPBACK, port, is_master=False, timeout=limit), seconds, lambda: _no_answer(client.where)
    )


def _no_answer(where: str) -> TrainingError:
    return TrainingError(f"no answer from {where}; start the same command on that machine")


def _unresponsive(where: str) -> str:
    return (
        f"{where} accepts connections, and has sent nothing for {HEAD_SECONDS:.0f} s: another program holds the "
        "port (choose another one, the same on all machines), or the launcher there hangs"
    )


def _wait_for(address: Address, deadline: float) -> None:
    where = f"{address[0]}:{address[1]}"
    if not is_open(*address):
        print(f"waiting for {where}; start the same command on that machine", file=sys.stderr, flush=True)
    while True:
        if time.monotonic() > deadline:
            raise _no_answer(where)
        if is_open(*address):
            return
        time.sleep(0.2)


def _same_token(address: Address) -> str:
    return (
        f"give it to this machine as {TOKEN}, or in a file as {TOKEN_FILE}. It is the one set on {address[0]}, or "
        f"the one that the command there printed and wrote to {TokenFile(Path(RUNS), address).path}"
    )
