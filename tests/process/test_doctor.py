"""The doctor at work: real processes that add up, fail, hang and are healed; and two machines."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from evenstep.doctor import Finding
from evenstep.doctor.bandwidth import Pair, add_up, try_pairs
from evenstep.doctor.checks import expected
from evenstep.doctor.remedies import TimeBudget, is_sound
from evenstep.doctor.sandbox import Job, try_out, try_together
from tests.faults.hosts import Host, hosts, why_no_hosts
from tests.waiting import wait_until

SMALL = (2**12, 2**16)


def doctor(*arguments: str, limit: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, below a limit that the shell sets."""
    shell = ["sh", "-c", f'{limit or "true"} && exec "$@"', "sh", sys.executable, "-m", "evenstep", "doctor"]
    given = {**os.environ, **environment}
    return subprocess.run([*shell, *arguments], capture_output=True, text=True, env=given, timeout=100)


def ranks_of(pid: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(pid).children(recursive=True) if name_of(one).startswith("evenstep-rank")]


def name_of(process: psutil.Process) -> str:
    # It may end between being listed and being asked.
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def test_two_processes_add_up_and_say_how_fast() -> None:
    ended = try_out(Job(add_up, (("cpu", "cpu"), SMALL)))
    assert is_sound(ended), ended
    assert [row["num_bytes"] for row in ended.returned[0]["rows"]] == list(SMALL)
    assert all(row["median_seconds"] > 0 for one in ended.returned for row in one["rows"])


def test_one_that_hangs_and_one_that_crashes_disturb_no_other() -> None:
    # A third rank, which never comes, is what the first job waits for.
    hanging = Job(add_up, (("cpu", "cpu"), SMALL), seconds=2, settings={"WORLD_SIZE": "3"})
    crashing = Job(os.abort)  # type: ignore[arg-type]
    failing = Job(add_up, (("cpu",), SMALL))
    late, crashed, failed, fine = try_together([hanging, crashing, failing, Job(add_up, (("cpu", "cpu"), SMALL))])
    assert (late.is_late, late.why) == (True, "no result within 2 s")
    assert "SIGABRT" in crashed.why
    assert "local rank 1 has no device" in failed.why
    assert is_sound(fine), fine


def test_finds_by_trying_that_a_variable_must_go() -> None:
    pair = Pair(("cpu", "cpu"), SMALL)
    broken = Broken(pair.devices, pair.sizes)
    (trial,) = try_pairs([broken], ["HOME", "GLOO_SOCKET_IFNAME"], TimeBudget())
    assert "nonsense" in trial.ended.why
    assert trial.helped_by == {"GLOO_SOCKET_IFNAME": None}
    assert trial.fixed is not None
    assert is_sound(trial.fixed)


class Hanging(Pair):
    """A pair of which nothing ever comes, whatever is set."""

    def job(self) -> Job:
        return replace(super().job(), function=time.sleep, arguments=(1000,))  # type: ignore[arg-type]


@pytest.mark.slow
def test_however_many_pairs_hang_it_ends() -> None:
    budget = TimeBudget()
    trials = [try_pairs([Hanging(("cpu", "cpu"))], ["GLOO_SOCKET_IFNAME"], budget)[0] for _ in range(6)]
    assert trials[0].ended.is_late
    assert trials[0].tried
    assert trials[-1].is_left_out
    assert all(one.is_left_out or one.ended.is_late for one in trials)


class Broken(Pair):
    """A pair in an environment that someone has spoiled."""

    def job(self) -> Job:
        return Job(add_up, (self.devices, self.sizes), settings={"GLOO_SOCKET_IFNAME": "nonsense"})


def test_what_the_slowest_sound_link_would_give_is_said() -> None:
    slow, fast, broken = (
        Finding(name, status, "", numbers={"latency_seconds": 3e-5, "bytes_per_second": rate})
        for name, status, rate in (
            ("cuda:0 + cuda:1, nccl", "warn", 2e9),
            ("cuda:0 + cuda:2, nccl", "good", 2e11),
            ("cuda:1 + cuda:2, nccl", "bad", 1e6),
        )
    )
    on_cpu = Finding("2 x cpu, gloo", "good", "", numbers={"latency_seconds": 1e-4, "bytes_per_second": 1e9})
    ((one,), (other,)) = expected([slow, fast, broken, on_cpu], 4), expected([fast, on_cpu], 4)
    assert one.said.startswith("with 4 of these devices expect ")
    assert "the link is the limit from " in one.said
    assert one.numbers["times"] < other.numbers["times"]  # type: ignore[operator]
    assert expected([broken, on_cpu], 4) == []
    (shared,) = expected([replace(on_cpu, numbers={**on_cpu.numbers, "copy_bytes_per_second": 1e10})], 2)
    assert "with 2 of these devices expect 1.8 x" in shared.said


@pytest.mark.slow
def test_the_command_finds_what_spoils_the_environment_and_what_helps() -> None:
    done = doctor("--json", limit="ulimit -n 256", GLOO_SOCKET_IFNAME="nonsense", CUDA_LAUNCH_BLOCKING="1")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    found = {one["name"]: one for one in report["findings"]}
    assert report["status"] == "bad"
    assert found["2 x cpu, gloo"]["advice"].startswith("unset GLOO_SOCKET_IFNAME   (found by trying")
    assert found["2 x cpu, gloo"]["numbers"]["bytes_per_second"] > 0
    assert found["GLOO_SOCKET_IFNAME"]["status"] == "bad"
    assert found["CUDA_LAUNCH_BLOCKING"]["status"] == "warn"
    assert (found["open files"]["status"], found["open files"]["numbers"]["files"]) == ("warn", 256)
    assert report["good"] + report["warn"] + report["bad"] == len(report["findings"])


@pytest.mark.slow
def test_a_pipe_gets_plain_words_without_control_bytes_and_an_exit_code_that_fits() -> None:
    done = doctor(NCCL_TOPO_FILE="\x1b[31mred[bold]")
    said = done.stdout
    (pair,) = [line for line in said.splitlines() if "2 x cpu, gloo" in line]
    assert "all-reduce is correct" in pair
    summary = re.fullmatch(r"(\d+) good, (\d+) warnings, (\d+) bad \(\d+ s\)", said.splitlines()[-1])
    assert summary is not None, said
    # A machine that runs tests need not be sound; what is said of it, counted and returned must agree.
    counted = [len(re.findall(f"(?m)^{status} ", said)) for status in ("good", "warn", "bad")]
    assert [int(one) for one in summary.groups()] == counted
    assert done.returncode == (1 if counted[2] else 0)
    assert "\x1b" not in said
    assert "NCCL_TOPO_FILE=red[bold]" in said
    assert "all-reduce: 2 x cpu, gloo ..." in done.stderr
    assert re.search(r"good +scaling.* with \d+ of these devices expect \d+\.\d x \(\d+\.\d to \d+\.\d\); ", said)


class Terminal:
    """One end is a program's screen; what it shows is read at the other, or the program would wait."""

    def __init__(self) -> None:
        self._near, self.far = pty.openpty()
        self.shown = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        # Linux answers with an error when nobody holds the other end any more.
        with suppress(OSError):
            while micro_batch := os.read(self._near, 4096):
                self.shown += micro_batch.decode(errors="replace")
        os.close(self._near)

    def close(self) -> None:
        os.close(self.far)
        self._reader.join(10)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        usual = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment}
        return subprocess.Popen(
            command, stdin=self.far, stdout=self.far, stderr=self.far, env=usual, start_new_session=True
        )


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    terminal = Terminal()
    process = terminal.start(sys.executable, "-m", "evenstep", "doctor", TMPDIR=str(tmp_path))
    wait_until(lambda: ranks_of(process.pid))
    every = psutil.Process(process.pid).children(recursive=True)
    # As a terminal does it: to all of them.
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    _, alive = psutil.wait_procs(every, timeout=10)
    terminal.close()
    assert alive == []
    assert list(tmp_path.glob("evenstep-*")) == []
    assert "stopped" in terminal.shown


@pytest.mark.slow
def test_a_terminal_gets_ticks() -> None:
    terminal = Terminal()
    process = terminal.start(sys.executable, "-m", "evenstep", "doctor", LC_ALL="C.UTF-8")
    process.wait(timeout=60)
    terminal.close()
    assert "✓" in terminal.shown
    assert "all-reduce is correct" in terminal.shown


def _start(machine: Host, folder: Path, head: Host, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "evenstep", "doctor", "--machines", "2", "--rendezvous", f"{head.address}:29400"]
    return machine.start(command, cwd=folder, env=environment)


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    if missing := why_no_hosts():
        pytest.skip(missing)
    with hosts(2, names="loopback") as machines:
        yield machines


@pytest.mark.slow
def test_two_machines_add_up_and_the_first_one_prints(two_hosts: list[Host], tmp_path: Path) -> None:
    started = [_start(machine, tmp_path, two_hosts[0]) for machine in reversed(two_hosts)]
    codes = [process.wait(timeout=100) for process in started]
    first, second = (machine.said() for machine in two_hosts)
    assert codes == [0, 0], first + second
    (pair,) = [line for line in first.splitlines() if "host0 + host1, gloo" in line]
    assert pair.startswith("good")
    assert "reports 10 Gbit/s" in pair
    assert re.search(r"good +clocks +0\.\d s apart", first)
    assert re.search("good +torch of all", first)
    assert "the first machine prints what was found" in second
    wait_until(lambda: not any(machine.pids() for machine in two_hosts))


@pytest.mark.slow
def test_what_spoils_one_machine_is_found_from_the_other(two_hosts: list[Host], tmp_path: Path) -> None:
    two_hosts[1].cap(20)
    started = [
        _start(two_hosts[1], tmp_path, two_hosts[0], GLOO_SOCKET_IFNAME="nonsense"),
        _start(two_hosts[0], tmp_path, two_hosts[0]),
    ]
    codes = [process.wait(timeout=110) for process in started]
    said = two_hosts[0].said()
    assert codes == [1, 1], said
    lines = said.splitlines()
    (pair,) = [number for number, line in enumerate(lines) if line.startswith("bad   host0 + host1, gloo")]
    assert "nonsense" in lines[pair]
    assert "-> unset GLOO_SOCKET_IFNAME   (found by trying" in lines[pair + 1]
    assert re.search("bad +host1: GLOO_SOCKET_IFNAME", said)


@pytest.mark.slow
def test_a_slow_link_is_warned_of(two_hosts: list[Host], tmp_path: Path) -> None:
    two_hosts[1].cap(20)
    started = [_start(machine, tmp_path, two_hosts[0]) for machine in two_hosts]
    codes = [process.wait(timeout=110) for process in started]
    said = two_hosts[0].said()
    assert codes == [0, 0], said
    assert re.search(r"warn +host0 \+ host1, gloo.*that is slow", said)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_nobody_waits_for_a_machine_that_is_lost(two_hosts: list[Host], tmp_path: Path, lost: int) -> None:
    started = [_start(machine, tmp_path, two_hosts[0]) for machine in two_hosts]
    wait_until(lambda: all("all-reduce between 2 machines" in machine.said() for machine in two_hosts))
    two_hosts[lost].kill()
    said = two_hosts[1 - lost]
    assert started[1 - lost].wait(timeout=45) == 1, said.said()
    assert ("10.77.0.1:29400 does not answer" if lost == 0 else "machine 2 does not answer") in said.said()
    assert "Traceback" not in said.said()
