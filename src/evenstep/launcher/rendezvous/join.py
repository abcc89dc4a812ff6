"""How a launcher becomes part of a run on many machines: as the one that holds it, or as one that was let in."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch._C._distributed_c10d import TCPStore

from evenstep.errors import PlanError, TrainingError
from evenstep.launcher.prepare import RUNS
from evenstep.launcher.rendezvous.addresses import (
    JOIN_SECONDS,
    LOOPBACK,
    address_toward,
    bound_to,
    connect,
    interface_of,
    is_open,
    open_store,
    timed,
)
from evenstep.launcher.rendezvous.auth import (
    TOKEN,
    TOKEN_FILE,
    Seal,
    TokenFile,
    given_token,
    labelled,
    make_token,
    opened_from_me,
    sealed_for_me,
    unlabelled,
)
from evenstep.launcher.rendezvous.slurm import find_slurm
from evenstep.launcher.rendezvous.tunnel import (
    RETRY_SECONDS,
    Busy,
    Gate,
    NotEvenstep,
    Way,
    WrongToken,
    credential_of,
    is_gate,
)
from evenstep.launcher.rendezvous.version_check import Identity

WAIT_FOR_HEAD_SECONDS = 300.0
WAIT_FOR_TOKEN_SECONDS = 10.0
"""From when the first machine answers: a folder that is on another machine's disk may show the file late."""

Address = tuple[str, int]


@dataclass(frozen=True)
class Entry:
    """A launcher's own part of what leads to the stores of a run."""

    run: str
    """A fresh id for every run."""
    seal: Seal
    store: TCPStore
    """Of the launchers."""
    passage: Gate | Way
    token_file: TokenFile | None = None

    def open_workers_store(self) -> tuple[TCPStore, int]:
        """A store for the workers of one attempt, on the first machine."""
        assert isinstance(self.passage, Gate)
        store = open_store()
        self.passage.lead_workers_to(store.port)
        return store, int(store.port)

    def port_to(self, port: int) -> int:
        """Where processes of this machine reach a store of the first one."""
        return port if isinstance(self.passage, Gate) else self.passage.port(port)

    def interface(self, address: Address) -> str | None:
        """The interface by which this machine and the others reach each other."""
        own = address_toward(address)
        if own is not None and own.startswith("127.") and isinstance(self.passage, Gate):
            # Its own name leads the first machine to itself; others know better.
            own = self.passage.reached_at or own
        return interface_of(own)

    def close(self) -> None:
        """Leave."""
        if self.token_file is not None:
            # While the port is held: the next run that takes it leaves a file of the same name.
            self.token_file.remove()
        self.passage.close()


def hold(address: Address, identity: Identity) -> Entry:
    """The first machine's: it listens, and makes a token if nobody has set one."""
    token = given_token()
    store = open_store(JOIN_SECONDS)
    with _listening(address) as bound:
        if token is not None:
            gate = Gate(bound, token, identity, store.port)
            return Entry(gate.run.hex(), Seal(gate.key), store, gate)
        return _hold_with_own_token(address, identity, bound, store)


def _hold_with_own_token(address: Address, identity: Identity, bound: socket.socket, store: TCPStore) -> Entry:
    token, file, is_slurm = make_token(), TokenFile(RUNS, address), find_slurm() is not None
    # The port is ours, and so is the file that is named after it; nobody is answered before it is there.
    file.write(token)
    try:
        credential = sealed_for_me(labelled(token)) if is_slurm else b""
        gate = Gate(bound, token, identity, store.port, credential)
    except BaseException:
        file.remove()
        raise
    if not is_slurm:
        print(file.announcement(token), file=sys.stderr, flush=True)
    return Entry(gate.run.hex(), Seal(gate.key), store, gate, file)


@contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    """The port, held from here on; given up again if the block fails."""
    try:
        bound = bound_to(address)
    except OSError as error:
        holder = "another run of evenstep holds it" if is_gate(address) else "another program holds it"
        why = f"port {address[1]} cannot be used ({os.strerror(error.errno or 0)})"
        raise PlanError(f"{why}; {holder}; choose another port, the same on all machines") from error
    try:
        yield bound
    except BaseException:
        bound.close()
        raise


def enter(address: Address, identity: Identity) -> Entry:
    """Another machine's: it waits for the first one, and asks to be let in."""
    where = f"{address[0]}:{address[1]}"
    deadline = time.monotonic() + WAIT_FOR_HEAD_SECONDS
    token = given_token()
    _wait_for(address, deadline)
    late = time.monotonic() + WAIT_FOR_TOKEN_SECONDS
    is_told = False
    while True:
        try:
            found = token or _token_of_slurm(address) or TokenFile(RUNS, address).read()
            way = _let_in(address, found, identity) if found else None
        except WrongToken as error:
            # In a file it may be that of a run before.
            if token is not None or time.monotonic() > late:
                raise PlanError(f"{error}; {_same_token(address)}") from None
            way = None
        except (OSError, EOFError) as error:
            # It has gone again, or is too busy to answer, or has its fill of connections for now.
            time.sleep(RETRY_SECONDS)
            if not isinstance(error, Busy):
                _wait_for(address, deadline)
            elif time.monotonic() > deadline:
                raise NotEvenstep(_mute(where)) from error
            elif not is_told:
                print(f"waiting for {where}, which is busy, or another program: {error}", file=sys.stderr, flush=True)
                is_told = True
            late = time.monotonic() + WAIT_FOR_TOKEN_SECONDS
            continue
        if way is not None:
            return _entered(way, deadline)
        if time.monotonic() > late:
            raise PlanError(f"{where} lets in who knows the run's token, and no token is set; {_same_token(address)}")
        time.sleep(RETRY_SECONDS)


def _entered(way: Way, deadline: float) -> Entry:
    try:
        return Entry(way.run.hex(), Seal(way.key), _store_through(way, deadline), way)
    except BaseException:
        way.close()
        raise


def _token_of_slurm(address: Address) -> str | None:
    """That of the first task, if this is another task of the same user's."""
    credential = credential_of(address) if find_slurm() is not None else b""
    text = opened_from_me(credential) if credential else None
    return unlabelled(text) if text is not None else None


def _store_through(way: Way, deadline: float) -> TCPStore:
    """By a bounded wait: torch tries for as long as the store's own timeout to reach one that is gone."""
    port = way.port()
    return timed(lambda: connect(LOOPBACK, port), max(1.0, deadline - time.monotonic()), lambda: _silent(way.where))


def _silent(where: str) -> TrainingError:
    return TrainingError(f"nobody answers at {where}; start the same command on that machine")


def _mute(where: str) -> str:
    return (
        f"{where} takes connections, and has said nothing for {WAIT_FOR_HEAD_SECONDS:.0f} s: another program holds the "
        "port (choose another one, the same on all machines), or the launcher there hangs"
    )


def _let_in(address: Address, token: str, identity: Identity) -> Way:
    way = Way(address, token, identity)
    try:
        way.knock()
    except BaseException:
        way.close()
        raise
    return way


def _wait_for(address: Address, deadline: float) -> None:
    where = f"{address[0]}:{address[1]}"
    if not is_open(*address):
        print(f"waiting for {where}; start the same command on that machine", file=sys.stderr, flush=True)
    while True:
        if time.monotonic() > deadline:
            raise _silent(where)
        if is_open(*address):
            return
        time.sleep(0.2)


def _same_token(address: Address) -> str:
    return (
        f"give it to this machine as {TOKEN}, or in a file as {TOKEN_FILE}. It is what was set on {address[0]}, or "
        f"what the command there has shown and left in {TokenFile(RUNS, address).path}"
    )
