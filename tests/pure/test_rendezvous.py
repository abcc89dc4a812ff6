"""Who gets into the run of others: whoever knows its token and fits; anyone else can only knock."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _NodeDesc,
    _RendezvousState,
)

from evenstep.errors import PlanError, TrainingError
from evenstep.launcher.rendezvous import store_access, tunnel
from evenstep.launcher.rendezvous.addresses import free_port, is_here, listen_on, open_store
from evenstep.launcher.rendezvous.auth import (
    MAX_CREDENTIAL_BYTES,
    MessageSigner,
    TokenFile,
    WrongToken,
    given_token,
    open_token,
    seal_token,
)
from evenstep.launcher.rendezvous.elastic import KEY, LAST_CALL, LONG_CALL, C10dRendezvous, SignedState
from evenstep.launcher.rendezvous.tunnel import (
    HELLO,
    MAX_UNPROVED_PER_ADDRESS,
    NONCE_BYTES,
    RUN_BYTES,
    AnotherRun,
    JoinRequest,
    NotEvenstep,
    TunnelClient,
    TunnelServer,
)
from evenstep.launcher.rendezvous.version_check import Identity, sources_of_file, sources_of_task
from evenstep.launcher.variables import TOKEN, TOKEN_FILE, launcher_variables
from evenstep.plan import Plan

NAME = "run"
GREETING_BYTES = len(HELLO) + RUN_BYTES + NONCE_BYTES + 2
ONE = "a token that nobody knows"
MINE = Identity("host0", {"task": "my_task.py", "batch": "64"}, {"torch": "2.13.0"}, {"my_task.py": "0a", "data": "0b"})


class Trap:
    """A pickle that makes a folder where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


def handler(store: Any, backend: Any) -> DynamicRendezvousHandler:
    made: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(NAME, store, backend, 1, 1, "localhost")
    return made


def test_torch_itself_unpickles_whatever_it_finds() -> None:
    """What SignedState is for; if torch stops doing this, half of it can go."""
    store = open_store()
    C10dRendezvousBackend(store, NAME).set_state(pickle.dumps(Trap()))
    with pytest.raises(AttributeError):
        handler(store, C10dRendezvousBackend(store, NAME)).num_nodes_waiting()
    assert Path("sprung").exists()


class TestTheStateOfARendezvous:
    @pytest.mark.parametrize("how", ["pickle", "signed by another", "nonsense"])
    def test_what_no_machine_of_the_run_has_signed_is_not_read_and_is_put_right(self, how: str) -> None:
        store = open_store()
        ours = handler(store, SignedState(store, MessageSigner(b"ours")))
        ours.next_rendezvous()
        written = {
            "pickle": pickle.dumps(Trap()).hex(),
            "signed by another": MessageSigner(b"theirs").sign(KEY, {"round": 7}),
            "nonsense": "?",
        }
        store.set(KEY, written[how])
        assert ours.num_nodes_waiting() == 0
        ours.set_closed()
        assert handler(store, SignedState(store, MessageSigner(b"ours"))).is_closed()
        assert not Path("sprung").exists()

    def test_an_older_state_does_not_come_back(self) -> None:
        store = open_store()
        ours = handler(store, SignedState(store, MessageSigner(b"ours")))
        ours.next_rendezvous()
        before = store.get(KEY)
        ours.set_closed()
        store.set(KEY, before.decode())
        assert ours.is_closed()

    def test_what_our_own_machines_write_is_read(self) -> None:
        store = open_store()
        first = handler(store, SignedState(store, MessageSigner(b"ours")))
        first.next_rendezvous()
        first.set_closed()
        assert handler(store, SignedState(store, MessageSigner(b"ours"))).is_closed()

    @pytest.mark.parametrize("wrong", [timedelta(seconds=-30), timedelta(hours=1)])
    def test_holds_no_time_of_another_machine_s_clock(self, wrong: timedelta) -> None:
        store = open_store()
        there, here = SignedState(store, MessageSigner(b"ours")), SignedState(store, MessageSigner(b"ours"))
        state, node = _RendezvousState(), _NodeDesc("there", 1, 0)
        state.last_heartbeats[node] = datetime.now(UTC) + wrong
        state.deadline = state.last_heartbeats[node] + LAST_CALL
        there.set_state(pickle.dumps(state))
        first = as_read(here)
        assert abs(first.last_heartbeats[node] - datetime.now(UTC)) < timedelta(seconds=5)
        assert abs(first.deadline - LAST_CALL - datetime.now(UTC)) < timedelta(seconds=5)
        again = as_read(here)
        assert abs(again.last_heartbeats[node] - first.last_heartbeats[node]) < timedelta(seconds=0.01), (
            "it is no newer"
        )
        assert again.participants == {}


def test_a_machine_that_is_known_to_wait_is_waited_for_longer() -> None:
    backend = SignedState(open_store(), MessageSigner(b"ours"))
    state, node = _RendezvousState(), _NodeDesc("here", 1, 0)
    state.participants[node] = 0
    state.deadline = datetime.now(UTC) + LAST_CALL
    backend.set_state(pickle.dumps(state))
    at_first = as_read(backend).deadline
    backend.times.num_expected = 2
    assert abs(as_read(backend).deadline - at_first - (LONG_CALL - LAST_CALL)) < timedelta(seconds=0.5)
    waiting = as_read(backend)
    waiting.participants[_NodeDesc("there", 1, 0)] = 1
    _, token = backend.get_state() or (b"", None)
    backend.set_state(pickle.dumps(waiting), token)
    assert abs(as_read(backend).deadline - at_first) < timedelta(seconds=0.5)


def as_read(backend: SignedState) -> Any:
    found = backend.get_state()
    assert found is not None
    return pickle.loads(found[0])


class TestAMessage:
    def test_is_for_one_place(self) -> None:
        seal = MessageSigner(b"key")
        message = seal.sign("plan", {"batch": 64}).encode()
        assert MessageSigner(b"key").verify("plan", message) == {"batch": 64}
        assert MessageSigner(b"key").verify("cause", message) is None

    def test_of_another_key_or_with_a_changed_letter_is_nothing(self) -> None:
        message = MessageSigner(b"key").sign("plan", {"batch": 64}).encode()
        assert MessageSigner(b"other").verify("plan", message) is None
        assert MessageSigner(b"key").verify("plan", message.replace(b"64", b"65")) is None
        assert MessageSigner(b"key").verify("plan", b"") is None

    def test_that_is_older_than_one_seen_is_nothing(self) -> None:
        writer, reader = MessageSigner(b"key"), MessageSigner(b"key")
        first = writer.sign("state", {"round": 1}).encode()
        assert writer.verify("state", first) is not None
        second = writer.sign("state", {"round": 2}).encode()
        assert reader.verify("state", first) == {"round": 1}
        assert reader.verify("state", second) == {"round": 2}
        assert reader.verify("state", first) is None

    def test_has_a_turn_of_its_own_though_its_writer_reads_nothing(self) -> None:
        writer, reader = MessageSigner(b"key"), MessageSigner(b"key")
        first, second = (writer.sign("plan", {"batch": batch}).encode() for batch in (1, 2))
        assert reader.verify("plan", second) == {"batch": 2}
        assert reader.verify("plan", first) is None
        assert reader.verify("plan", second) == {"batch": 2}, "what stands there is read again"

    def test_of_the_turn_of_one_seen_is_nothing_if_it_says_something_else(self) -> None:
        one, other, reader = MessageSigner(b"key"), MessageSigner(b"key"), MessageSigner(b"key")
        assert reader.verify("state", one.sign("state", {"by": 1}).encode()) == {"by": 1}
        assert reader.verify("state", other.sign("state", {"by": 2}).encode()) is None

    def test_that_the_store_did_not_take_leaves_its_writer_able_to_read_the_one_it_took(self) -> None:
        one, other = MessageSigner(b"key"), MessageSigner(b"key")
        one.sign("state", {"by": 1})
        assert one.verify("state", other.sign("state", {"by": 2}).encode()) == {"by": 2}


@contextmanager
def gate(token: str = ONE, identity: Identity = MINE) -> Iterator[tuple[TunnelServer, tuple[str, int], dist.Store]]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = ("127.0.0.1", int(listener.getsockname()[1]))
    store = open_store()
    made = TunnelServer(listener, token, identity, store.port)
    try:
        yield made, address, store
    finally:
        made.close()


@contextmanager
def way(address: tuple[str, int], token: str = ONE, identity: Identity = MINE) -> Iterator[TunnelClient]:
    made = TunnelClient(address, token, identity)
    try:
        yield made
    finally:
        made.close()


# A gate that closes drops connections that are being accepted, and asyncio warns when it finds their writers.
@pytest.mark.filterwarnings("ignore:.*StreamWriter.__del__:pytest.PytestUnraisableExceptionWarning")
class TestTheGate:
    def test_leads_who_knows_the_token_to_the_store(self) -> None:
        with gate() as (_, address, store), way(address) as mine:
            mine.authenticate()
            there = dist.TCPStore("127.0.0.1", mine.port(), is_master=False)
            there.set("from", "far away")
            assert store.get("from") == b"far away"
            assert there.add("count", 5) == 5

    def test_turns_away_who_does_not(self) -> None:
        with gate() as (_, address, _), way(address, "a token of somebody else's") as theirs:
            with pytest.raises(WrongToken, match=f"the run at 127.0.0.1:{address[1]} has another token"):
                theirs.authenticate()
            with socket.create_connection(("127.0.0.1", theirs.port()), timeout=5) as process:
                assert ends(process)

    def test_says_nothing_to_a_stranger_but_that_it_is_one(self) -> None:
        with gate() as (made, address, _), socket.create_connection(address) as stranger:
            stranger.settimeout(5)
            said = stranger.recv(1000, socket.MSG_WAITALL) if stranger.send(bytes(NONCE_BYTES + 32)) else b""
            assert said.startswith(HELLO + made.run)
            assert len(said) == GREETING_BYTES

    def test_what_was_heard_of_one_connection_opens_no_other(self) -> None:
        with gate() as (_, address, _):
            heard = overheard(address)
            with socket.create_connection(address) as again:
                again.settimeout(5)
                greeting = again.recv(GREETING_BYTES, socket.MSG_WAITALL)
                assert len(greeting) > len(HELLO)
                again.sendall(heard)
                assert ends(again)

    def test_strangers_who_say_nothing_do_not_keep_others_out(self) -> None:
        with gate() as (_, address, _):
            strangers = [socket.create_connection(address, source_address=("127.0.0.2", 0)) for _ in range(100)]
            with way(address) as mine:
                mine.authenticate()
            assert all(one.recv(1) for one in strangers[:MAX_UNPROVED_PER_ADDRESS])
            assert ends(strangers[-1]), "one address has so many, and no more"
            for one in strangers:
                one.close()

    def test_names_what_does_not_fit_on_both_sides_and_goes_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        theirs = Identity("host1", {**MINE.command, "batch": "128"}, {"torch": "2.11.0"}, {"my_task.py": "ff"})
        with gate() as (_, address, _):
            with way(address, identity=theirs) as other, pytest.raises(PlanError) as refused:
                other.authenticate()
            said = str(refused.value)
            assert "batch is 128 on host1 and 64 on host0; torch is 2.11.0 on host1 and 2.13.0 on host0" in said
            assert "the source of my_task.py is ff on host1 and 0a on host0" in said
            assert "the source of data is absent on host1 and 0b on host0" in said
            assert "host1 was refused: batch is 128" in capsys.readouterr().err
            with way(address) as mine:
                mine.authenticate()

    def test_a_gate_that_does_not_know_the_token_is_no_gate(self) -> None:
        """Whoever poses as the first machine learns nothing that opens the true one."""
        with gate("a token of somebody else's") as (_, address, _), way(address) as mine, pytest.raises(WrongToken):
            mine.authenticate()

    @pytest.mark.parametrize("greeting", [b"220\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100)])
    def test_something_else_is_no_gate(self, greeting: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, way(listener.getsockname()) as mine:
            port = mine.port()
            with socket.create_connection(("127.0.0.1", port)) as here:
                other, _ = listener.accept()
                other.sendall(greeting)
                other.close()
                here.settimeout(5)
                assert ends(here)

    def test_of_another_port_for_workers_the_one_before_is_closed(self) -> None:
        with gate() as (_, address, _), way(address) as mine:
            first, launchers, second = mine.port(1), mine.port(), mine.port(2)
            assert not addresses_of(first)
            assert addresses_of(launchers) == addresses_of(second) == {"127.0.0.1"}

    def test_a_run_that_was_started_again_is_another_one(self) -> None:
        with gate() as (_, address, _), way(address) as mine:
            mine.authenticate()
            mine.run = bytes(RUN_BYTES)
            with pytest.raises(AnotherRun, match="another one has begun there"):
                mine.authenticate()


class FaintGate(TunnelServer):
    """It hangs up on the first machine that has proved that it knows the token."""

    num_asked = 0

    def _refusal(self, hello: JoinRequest) -> str:
        self.num_asked += 1
        if self.num_asked == 1:
            raise EOFError
        return super()._refusal(hello)


class TestAMachineThatEnters:
    @pytest.fixture(autouse=True)
    def _hurry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(TOKEN, ONE)
        monkeypatch.setattr(tunnel, "ANSWER_SECONDS", 0.3)

    def test_waits_for_a_launcher_that_is_too_busy_to_answer(self, capsys: pytest.CaptureFixture[str]) -> None:
        listener, store = socket.create_server(("127.0.0.1", 0)), open_store()
        with entering(listener.getsockname()) as entered:
            time.sleep(1)
            assert not entered.done(), "it has not been turned away"
            made = TunnelServer(listener, ONE, MINE, store.port)
            assert entered.result(20).run == made.run.hex()
        made.close()
        assert "which is busy" in capsys.readouterr().err

    def test_waits_for_room_where_its_own_address_holds_too_many_connections(self) -> None:
        with gate() as (made, address, _):
            others = [socket.create_connection(address) for _ in range(MAX_UNPROVED_PER_ADDRESS)]
            assert all(one.recv(1) for one in others)
            with entering(address) as entered:
                time.sleep(1)
                assert not entered.done(), "it has not been turned away"
                for one in others:
                    one.close()
                assert entered.result(20).run == made.run.hex()

    def test_tries_again_when_the_gate_hangs_up_after_its_proof(self) -> None:
        listener, store = socket.create_server(("127.0.0.1", 0)), open_store()
        made = FaintGate(listener, ONE, MINE, store.port)
        with entering(listener.getsockname()) as entered:
            assert entered.result(20).run == made.run.hex()
        assert made.num_asked > 1
        made.close()

    def test_takes_what_never_says_a_word_for_something_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_access, "HEAD_SECONDS", 1.0)
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            pytest.raises(NotEvenstep, match="accepts connections, and has sent nothing for 1 s"),
        ):
            store_access.join_run(listener.getsockname(), MINE)


@contextmanager
def entering(address: tuple[str, int]) -> Iterator[Future[store_access.StoreAccess]]:
    """A machine that enters meanwhile, and leaves at the end."""
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(store_access.join_run, address, MINE)
        yield entered
        entered.result(20).close()


def overheard(address: tuple[str, int]) -> bytes:
    """All that a machine says to the gate, as someone between them hears it."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener, way(listener.getsockname()) as mine:
        port = mine.port()
        with socket.create_connection(("127.0.0.1", port)) as process:
            between, _ = listener.accept()
            with between, socket.create_connection(address) as on:
                between.settimeout(5)
                on.settimeout(5)
                between.sendall(on.recv(GREETING_BYTES, socket.MSG_WAITALL))
                heard += between.recv(NONCE_BYTES + 32, socket.MSG_WAITALL)
                on.sendall(heard)
                between.sendall(on.recv(32, socket.MSG_WAITALL))
                heard += between.recv(100_000)
            process.close()
    return bytes(heard)


def ends(connection: socket.socket) -> bool:
    """Whether the other side hangs up without another word."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


@contextmanager
def machines(port: int, is_head: bool, identity: Identity = MINE) -> Iterator[C10dRendezvous]:
    made = C10dRendezvous(("127.0.0.1", port), (1, 2), identity, is_head)
    try:
        yield made
    finally:
        made.close()


def plan() -> Plan:
    return Plan(task="my_task.py", strategy="ddp", batch=8, epochs=1)


class TestTheToken:
    def test_that_is_short_is_refused_with_what_makes_one(self) -> None:
        with pytest.raises(PlanError, match=r"has 11 characters, and 16 is the minimum(?s:.*)secrets.token_hex"):
            given_token(launcher_variables({TOKEN: "open sesame"}))

    def test_is_read_from_a_file_that_nobody_else_can_read(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text(f"{ONE}\n")
        file.chmod(0o640)
        with pytest.raises(PlanError, match=r"accessible to other users \(mode 640\): chmod 600"):
            given_token(launcher_variables({TOKEN_FILE: str(file)}))
        file.chmod(0o600)
        assert given_token(launcher_variables({TOKEN_FILE: str(file)})) == ONE
        with pytest.raises(PlanError, match="both set"):
            given_token(launcher_variables({TOKEN: ONE, TOKEN_FILE: str(file)}))
        with pytest.raises(PlanError, match="cannot be read: No such file"):
            given_token(launcher_variables({TOKEN_FILE: str(tmp_path / "nowhere")}))

    def test_that_nobody_has_set_is_made_and_left_where_machines_of_the_folder_find_it(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv(TOKEN, raising=False)
        port = free_port()
        with machines(port, is_head=True) as head:
            (file,) = Path("runs").iterdir()
            assert (file.name, file.stat().st_mode & 0o777) == (f".token-127.0.0.1-{port}", 0o600)
            token = file.read_text().strip()
            assert len(token) == 64
            said = capsys.readouterr().err
            assert "export EVENSTEP_TOKEN=" in said
            assert token not in said, "what is no terminal may be a file that others read"
            head.publish(plan())
            with machines(port, is_head=False) as second:
                assert second.read_plan() == plan()
        assert not file.exists()

    def test_is_shown_on_a_terminal_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        file = TokenFile(Path("runs"), ("10.0.0.1", 29400))
        assert file.announcement(ONE).endswith("export EVENSTEP_TOKEN=...   (see runs/.token-10.0.0.1-29400)")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        assert file.announcement(ONE).endswith(f"export EVENSTEP_TOKEN={ONE}")

    def test_of_an_earlier_run_that_was_left_behind_is_waited_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(TOKEN, raising=False)
        monkeypatch.setattr(store_access, "TOKEN_SECONDS", 1.0)
        port = free_port()
        with machines(port, is_head=True):
            TokenFile(Path("runs"), ("127.0.0.1", port)).write("of a run that was killed")
            with pytest.raises(PlanError, match="has another token; give it to this machine as EVENSTEP_TOKEN"):
                C10dRendezvous(("127.0.0.1", port), (1, 2), MINE, False)

    def test_is_asked_for_where_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_access, "TOKEN_SECONDS", 0.5)
        monkeypatch.setenv(TOKEN, ONE)
        port = free_port()
        with machines(port, is_head=True):
            monkeypatch.delenv(TOKEN)
            with pytest.raises(PlanError, match=f"requires the run's token, and none is set; .*{TOKEN}"):
                C10dRendezvous(("127.0.0.1", port), (1, 2), MINE, False)

    def test_cannot_be_had_from_what_is_in_the_store(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(TOKEN, ONE)
        with machines(free_port(), is_head=True) as head:
            head.publish(plan())
            message = head._store.get("plan")
            assert b"my_task.py" in message
            assert ONE.encode() not in message
            assert head._signer.key.hex().encode() not in message


def test_a_machine_with_another_token_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(TOKEN, ONE)
    with machines(port, is_head=True):
        monkeypatch.setenv(TOKEN, "a token of somebody else's")
        with pytest.raises(PlanError, match=f"the run at 127.0.0.1:{port} has another token"):
            C10dRendezvous(("127.0.0.1", port), (1, 2), MINE, False)


def test_a_machine_with_the_same_token_and_another_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(TOKEN, ONE)
    with machines(port, is_head=True):
        other = replace(MINE, machine="host1", command={"task": "my_task.py", "seed": "1"})
        with pytest.raises(PlanError, match="batch is absent on host1 and 64 on host0; seed is 1 on host1"):
            C10dRendezvous(("127.0.0.1", port), (1, 2), other, False)


def test_a_plan_that_was_forged_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, ONE)
    port = free_port()
    with machines(port, is_head=True) as head:
        head.publish(plan())
        signed = head._store.get("plan")
        head._store.set("plan", signed.replace(b"my_task.py", b"/tmp/ev.py").decode())
        with machines(port, is_head=False) as second:
            assert second._read(second._store, {"none": "none"}, 0.1) is None
            with pytest.raises(TrainingError, match="unauthorized process"):
                second._read(second._store, {"plan": "plan"}, 0.2)
            head.publish(plan())
            assert second.read_plan() == plan()


def test_the_plan_of_an_earlier_run_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same token and the same command; the id of the run is another."""
    monkeypatch.setenv(TOKEN, ONE)
    port = free_port()
    with machines(port, is_head=True) as earlier:
        earlier.publish(plan())
        before = earlier._store.get("plan")
    with machines(port, is_head=True) as head:
        head._store.set("plan", before.decode())
        with machines(port, is_head=False) as second, pytest.raises(TrainingError, match="unauthorized process"):
            second._read(second._store, {"plan": "plan"}, 0.2)


def test_stores_listen_to_this_machine_alone_and_the_gate_to_the_interface_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN, ONE)
    port = free_port()
    with machines(port, is_head=True) as head:
        _, workers = head._access.open_workers_store()
        assert addresses_of(port) == {"127.0.0.1"}
        assert addresses_of(workers) == {"127.0.0.1"}


def addresses_of(port: int) -> set[str]:
    return {one.laddr.ip for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port}


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, ONE)
    store = open_store()
    with pytest.raises(PlanError, match=f"port {store.port} cannot be used .* another program holds it"):
        C10dRendezvous(("127.0.0.1", store.port), (1, 2), MINE, True)


@pytest.mark.parametrize("own", ["127.0.0.2", "127.0.1.1", "::1"])
def test_a_loopback_address_is_listened_at_and_nothing_else(own: str) -> None:
    if own == "::1" and not is_here(own):
        pytest.skip("there is no IPv6")
    with listen_on((own, 0)) as bound:
        assert bound.getsockname()[0] == own


def test_a_port_that_another_run_holds_leaves_that_run_s_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    port = free_port()
    with machines(port, is_head=True):
        (file,) = Path("runs").iterdir()
        before = file.read_text()
        with pytest.raises(PlanError, match="another run of evenstep holds it"):
            C10dRendezvous(("127.0.0.1", port), (1, 2), MINE, True)
        assert file.read_text() == before


def test_a_machine_that_fails_after_it_entered_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    port = free_port()
    with pytest.raises(ValueError, match="maximum number of nodes"):
        C10dRendezvous(("127.0.0.1", port), (2, 1), MINE, True)
    assert not list(Path("runs").iterdir())
    assert not addresses_of(port)


SEALED = "d9" * 32


class TestMunge:
    def test_what_is_too_long_is_not_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program = Path("programs/unmunge")
        program.parent.mkdir()
        program.write_text("#!/bin/sh\ntouch asked\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent.resolve()), prepend=":")
        assert open_token(b"A" * (MAX_CREDENTIAL_BYTES + 1)) is None
        assert not Path("asked").exists()

    def test_where_there_is_none_nothing_is_sealed_or_opened(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        assert seal_token(ONE) == b""
        assert open_token(b"MUNGE:AAAA:") is None

    @pytest.mark.parametrize(
        ("maker", "code", "text", "is_opened"),
        [
            (f"UID: {os.geteuid()}", 0, f"evenstep token {SEALED}", True),
            (f"UID: {os.geteuid()}", 17, f"evenstep token {SEALED}", True),
            (f"UID: {os.geteuid() + 1}", 0, f"evenstep token {SEALED}", False),
            (f"UID: {os.geteuid()}", 18, f"evenstep token {SEALED}", False),
            ("nonsense", 0, f"evenstep token {SEALED}", False),
            # This user may have sealed anything.
            (f"UID: {os.geteuid()}", 0, SEALED, False),
            (f"UID: {os.geteuid()}", 0, "evenstep token short", False),
        ],
    )
    def test_a_credential_counts_if_this_user_sealed_a_token(
        self, monkeypatch: pytest.MonkeyPatch, maker: str, code: int, text: str, is_opened: bool
    ) -> None:
        """By a program that answers as munge's does; the real one is asked in the tests of Slurm."""
        program = Path("programs/unmunge")
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\ncat > /dev/null\nprintf '{maker}\\n\\n{text}'\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent.resolve()), prepend=":")
        assert open_token(b"MUNGE:AAAA:") == (SEALED if is_opened else None)


class TestTheSourcesOfATask:
    def test_are_its_file_and_what_it_imports_from_its_folder(self) -> None:
        Path("my_task.py").write_text("import os, torch\nfrom package.data import samples\nimport late\n")
        Path("late.py").write_text("def load():\n    from package import more\n")
        Path("package").mkdir()
        Path("package/__init__.py").write_text("from . import helpers\n")
        Path("package/data.py").write_text("from .helpers import thing\nimport missing\n")
        Path("package/helpers.py").write_text("thing = 1\n")
        Path("package/more.py").write_text("")
        Path("unrelated.py").write_text("")
        found = sources_of_task("my_task.py:task")
        assert sorted(found) == ["late", "my_task.py", "package", "package.data", "package.helpers", "package.more"]
        Path("package/helpers.py").write_text("thing = 2\n")
        after = sources_of_task("my_task.py")
        assert [name for name in found if found[name] != after[name]] == ["package.helpers"]

    def test_of_a_module_and_of_what_is_installed(self) -> None:
        Path("package").mkdir()
        Path("package/train.py").write_text("import json\n")
        assert sorted(sources_of_task("package.train:task")) == ["package.train"]
        assert sources_of_task("digits") == {}
        assert sources_of_task("torch.nn:Module") == {}

    @pytest.mark.parametrize("spec", ["", ":task", "a..b", "x" * 300, "../up", "a b"])
    def test_of_what_is_no_name_of_a_module_are_none(self, spec: str) -> None:
        assert sources_of_task(spec) == {}

    def test_of_a_long_chain_of_imports_are_all_of_it(self) -> None:
        for number in range(1500):
            Path(f"m{number}.py").write_text(f"import m{number + 1}\n")
        assert len(sources_of_task("m0")) == 1500

    def test_that_are_nested_too_deeply_to_be_parsed_are_compared(self) -> None:
        Path("deep.py").write_text("x = " + "-" * 100_000 + "1\n")
        assert sorted(sources_of_task("deep.py")) == ["deep.py"]

    def test_that_do_not_parse_are_compared_all_the_same(self) -> None:
        Path("broken.py").write_text("def (")
        assert sorted(sources_of_file(Path("broken.py"))) == ["broken.py"]
