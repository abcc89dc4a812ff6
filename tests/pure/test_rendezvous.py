"""What someone who can reach the rendezvous, and does not know the token, can do: nothing but be noticed."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from evenstep.errors import PlanError, TrainingError
from evenstep.launcher.machines import Machines
from evenstep.launcher.signed import TOKEN, Signed
from evenstep.launcher.stores import open_store
from evenstep.plan import Plan

NAME = "run"


class Trap:
    """A pickle that makes a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


def handler(store: Any, backend: C10dRendezvousBackend) -> DynamicRendezvousHandler:
    made: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(NAME, store, backend, 1, 2, "localhost")
    return made


def test_torch_itself_unpickles_whatever_it_finds() -> None:
    """What Signed is for; if torch stops doing this, Signed can go."""
    store = open_store()
    C10dRendezvousBackend(store, NAME).set_state(pickle.dumps(Trap()))
    with pytest.raises(AttributeError):
        handler(store, C10dRendezvousBackend(store, NAME)).num_nodes_waiting()
    assert Path("sprung").exists()


@pytest.mark.parametrize("is_signed", [False, True])
def test_a_state_that_was_not_signed_with_our_token_is_not_unpickled(is_signed: bool) -> None:
    store = open_store()
    forger = Signed(store, NAME, b"theirs") if is_signed else C10dRendezvousBackend(store, NAME)
    forger.set_state(pickle.dumps(Trap()))
    with pytest.raises(RendezvousStateError, match="no machine of this run"):
        handler(store, Signed(store, NAME, b"ours")).num_nodes_waiting()
    assert not Path("sprung").exists()


def test_what_our_own_machines_write_is_read() -> None:
    store = open_store()
    assert Signed(store, NAME, b"ours").set_state(b"state") is not None
    found = Signed(store, NAME, b"ours").get_state()
    assert found is not None
    assert found[0] == b"state"


@contextmanager
def machines(common: str, port: int, is_head: bool) -> Iterator[Machines]:
    made = Machines(("127.0.0.1", port), (1, 2), common, is_head)
    try:
        yield made
    finally:
        made.close()


def free_port() -> int:
    return int(open_store().port)


def plan() -> Plan:
    return Plan(task="my_task.py", strategy="ddp", batch=8, epochs=1)


def test_the_token_cannot_be_read_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "open sesame")
    port = free_port()
    with machines("", port, is_head=True) as head:
        head.publish(plan())
        stranger = dist.TCPStore("127.0.0.1", port)
        name = stranger.get("evenstep")
        assert head._token not in name
        assert head._token.hex().encode() not in name
        message = stranger.get(f"{name[:16].decode()}/plan")
        assert b"my_task.py" in message
        assert head._token.hex().encode() not in message
        assert b"sesame" not in message


def test_a_plan_that_was_forged_is_refused() -> None:
    port = free_port()
    with machines("train my_task.py", port, is_head=True) as head:
        head.publish(plan())
        stranger = dist.TCPStore("127.0.0.1", port)
        key = f"{stranger.get('evenstep')[:16].decode()}/plan"
        forged = {"plan": {**plan().to_json(), "task": "/tmp/evil.py"}, "refused": ""}
        stranger.set(key, stranger.get(key)[:64].decode() + json.dumps(forged))
        with (
            machines("train my_task.py", port, is_head=False) as second,
            pytest.raises(TrainingError, match="no machine of this run"),
        ):
            second.read_plan()


def test_a_machine_with_another_token_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(TOKEN, "one")
    with machines("", port, is_head=True):
        monkeypatch.setenv(TOKEN, "other")
        with pytest.raises(PlanError, match=f"127.0.0.1:{port} is held by another run of evenstep"):
            Machines(("127.0.0.1", port), (1, 2), "", False)


def test_a_port_that_is_taken_is_named() -> None:
    store = open_store()
    with pytest.raises(PlanError, match=f"port {store.port} cannot be used .* another program holds it"):
        Machines(("127.0.0.1", store.port), (1, 2), "", True)
