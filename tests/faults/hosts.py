"""Several hosts on one machine: Linux namespaces of network, processes and names, joined by a bridge of its own.

    with hosts(2) as (first, second):
        process = second.start(["python", "train.py"], env={"MASTER_ADDR": first.address})
        second.cut()                      # packets vanish, nobody is told
        print(second.said())

    with hosts(2, delay_ms=10) as (first, second):   # 20 ms there and back, by delayed_switch.py instead of a bridge
        first.cap(1000)

Nothing of it touches the machine's own network, so two test runs at once may use the same addresses. A process of one
host cannot see those of another, so that hosts cannot share memory.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

Names = Literal["known", "loopback", "foreign", "unknown"]

DELAYED_SWITCH = Path(__file__).with_name("delayed_switch.py")
NEEDED = ["ip", "tc", "ss", "unshare", "nsenter", "mount", "hostname"]
FOREIGN = "10.99.99.99"
_worlds = itertools.count()

# Runs in new namespaces: /etc/hosts and /proc change for nobody else.
BOOT = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
# Process 1 of a host. Linux reaps for it whose parent has ended, where SIGCHLD is ignored.
INIT = (
    "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nprint('up', flush=True)\nwhile True: signal.pause()"
)
# Mounts of its own for every command, in the folder where it was started.
ENTER = 'cd "$1" && shift && exec "$@"'


class Entered(subprocess.Popen[bytes]):
    """A command inside a host; nsenter waits for it, and ends as it ends, but passes no signal on."""

    @property
    def inner(self) -> int:
        """The command's own process id, as it is called outside."""
        while not (found := Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()):
            time.sleep(0.005)
        return int(found[0])

    def send_signal(self, sig: int) -> None:
        """To the command itself."""
        if self.poll() is None:
            os.kill(self.inner, sig)


@dataclass(frozen=True)
class Host:
    """One machine of its own name and address, as far as its processes can tell."""

    name: str
    address: str
    namespace: str
    switch: str
    folder: Path
    processes: list[Entered] = field(default_factory=list, compare=False, repr=False)
    """The first holds the namespaces; all others are commands."""

    @property
    def log(self) -> Path:
        """What the processes of this host print, unless they were given a file of their own."""
        return self.folder / f"{self.name}.log"

    def said(self) -> str:
        """All that its processes have printed so far."""
        return self.log.read_text() if self.log.exists() else ""

    def start(
        self,
        command: Sequence[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> Entered:
        """Start a command on this host in a session of its own, with `env` added to our environment."""
        with (log or self.log).open("ab") as output:
            process = Entered(
                self._enter(command, cwd),
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def run(self, *command: str, timeout_seconds: float = 30) -> str:
        """What a command prints when it runs to its end on this host."""
        return _run(*self._enter(command), timeout_seconds=timeout_seconds)

    def cut(self) -> None:
        """Pull this host's cable: packets vanish both ways, no connection is told. Not with a delayed switch."""
        _run("ip", "-n", self.switch, "link", "set", self.name, "down")

    def mend(self) -> None:
        """Put the cable back."""
        _run("ip", "-n", self.switch, "link", "set", self.name, "up")

    def cap(self, mbit: float) -> None:
        """Let this host send no more than `mbit` megabits a second."""
        # What may be sent at once: with less than 2 ms of it, a busy machine refills it too late (1 Gbit became 0.35).
        burst = max(2**16, round(mbit * 1e6 / 8 * 2.1e-3))
        shape = ["rate", f"{round(mbit * 1e6)}bit", "burst", f"{burst}b", "latency", "400ms"]
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape)

    def uncap(self) -> None:
        """Give this host its full speed back."""
        _run("tc", "-n", self.namespace, "qdisc", "del", "dev", "eth0", "root")

    def listening(self) -> set[str]:
        """Every address and port on which a process of this host accepts connections, as `10.77.0.1:29500`."""
        return {line.split()[3] for line in _run("ss", "-N", self.namespace, "-Hltn").splitlines()}

    def is_listening(self, port: int) -> bool:
        """Whether some process of this host accepts connections on `port`."""
        return any(socket.endswith(f":{port}") for socket in self.listening())

    def pids(self) -> list[int]:
        """The processes that live on this host now, as they are called outside; not what makes it a host."""
        holder = self.processes[0]
        return [pid for pid in _pids(self.namespace) if pid not in (holder.pid, holder.inner)]

    def kill(self) -> None:
        """End all processes of this host at once, as a power cut would (but the cable stays in)."""
        _kill(self.pids)

    def boot(self) -> None:
        """Make the namespaces; they last as long as process 1 does."""
        own = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--pid", "--fork", "--mount-proc"]
        table = str(self.folder / f"{self.name}.hosts")
        init = ["sh", "-c", BOOT, "sh", self.name, table, sys.executable, "-S", "-c", INIT]
        log = self.folder / f"{self.name}.boot"
        with log.open("wb") as output:
            holder = Entered([*own, *init], stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        self.processes.append(holder)
        _wait_for_up(log, holder)

    def _enter(self, command: Sequence[str], cwd: Path | None = None) -> list[str]:
        spaces = ["--mount", "--uts", "--net", "--pid"]
        enter = ["nsenter", "--target", str(self.processes[0].inner), *spaces, "unshare", "--mount"]
        return [*enter, "sh", "-c", ENTER, "sh", str(cwd or Path.cwd()), *command]


@contextmanager
def hosts(
    count: int, addresses: Sequence[str] | None = None, names: Names = "known", delay_ms: float = 0
) -> Iterator[list[Host]]:
    """So many hosts on one switch, at 10.77.0.1 and on unless told; all of it is gone at the end.

    What one sends arrives `delay_ms` later: there and back takes twice that.

    `names` is what /etc/hosts of each says: every host (known), its own name as 127.0.1.1 as Debian's installer
    does, and every other (loopback), its own name at an address that it does not have (foreign), or no name at all
    (unknown).
    """
    addresses = addresses or [f"10.77.0.{number}" for number in range(1, count + 1)]
    assert len(set(addresses)) == count, f"{count} hosts need {count} different addresses, not {addresses}"
    _remove_what_dead_runs_left()
    world = f"evenstep-{os.getpid()}-{next(_worlds)}"
    with tempfile.TemporaryDirectory(prefix=f"{world}-") as folder:
        machines = [
            Host(f"host{number}", address, f"{world}-host{number}", f"{world}-switch", Path(folder))
            for number, address in enumerate(addresses)
        ]
        try:
            _build(machines, names, delay_ms)
            yield machines
        finally:
            _remove([*(machine.namespace for machine in machines), f"{world}-switch"])
            for process in itertools.chain.from_iterable(machine.processes for machine in machines):
                process.wait()


def why_no_hosts(*, are_delayed: bool = False) -> str | None:
    """What this machine lacks for hosts(), or None."""
    if are_delayed and not os.access("/dev/net/tun", os.W_OK):
        return "delays between hosts need /dev/net/tun, which this machine has not, or not for this user"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install iproute2 util-linux hostname"
    try:
        with hosts(1) as (machine,):
            machine.cap(100)
            machine.run("true")
    except subprocess.CalledProcessError as refused:
        return f"`{' '.join(refused.cmd)}` was refused: {refused.stderr.strip()}"
    return None


def _build(machines: Sequence[Host], names: Names, delay_ms: float) -> None:
    _run("ip", "netns", "add", machines[0].switch)
    for machine in machines:
        (machine.folder / f"{machine.name}.hosts").write_text(_name_table(machine, machines, names))
        _run("ip", "netns", "add", machine.namespace)
    switch = _join_later(machines, delay_ms) if delay_ms else _join(machines)
    for machine in machines:
        there = ["ip", "-n", machine.namespace]
        _run(*there, "addr", "add", f"{machine.address}/16", "dev", "eth0")
        _run(*there, "link", "set", "eth0", "up")
        _run(*there, "link", "set", "lo", "up")
        machine.boot()
    machines[0].processes.extend(switch)


def _join(machines: Sequence[Host]) -> list[Entered]:
    """A bridge, which needs no process."""
    switch = machines[0].switch
    _run("ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge")
    for machine in machines:
        peer = ["peer", "name", "eth0", "netns", machine.namespace]
        _run("ip", "-n", switch, "link", "add", machine.name, "type", "veth", *peer)
        _run("ip", "-n", switch, "link", "set", machine.name, "master", "bridge", "up")
    return []


def _join_later(machines: Sequence[Host], delay_ms: float) -> list[Entered]:
    """A process that holds packets back, and lives in the switch's namespace."""
    log = machines[0].folder / "switch.log"
    namespaces = [*(machine.namespace for machine in machines), machines[0].switch]
    command = [sys.executable, "-S", str(DELAYED_SWITCH), str(delay_ms), *namespaces]
    with log.open("wb") as output:
        switch = Entered(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    _wait_for_up(log, switch)
    return [switch]


def _wait_for_up(log: Path, process: Entered) -> None:
    while log.read_text() != "up\n":
        if process.poll() is not None:
            raise subprocess.CalledProcessError(process.returncode, process.args, stderr=log.read_text())
        time.sleep(0.005)


def _name_table(machine: Host, machines: Sequence[Host], names: Names) -> str:
    own = {"loopback": f"127.0.1.1 {machine.name}\n", "foreign": f"{FOREIGN} {machine.name}\n"}
    there = {"known": machines, "loopback": [each for each in machines if each is not machine]}
    known = "".join(f"{each.address} {each.name}\n" for each in there.get(names, []))
    return "127.0.0.1 localhost\n" + known + own.get(names, "")


def _remove_what_dead_runs_left() -> None:
    """A test run that was killed with SIGKILL could not clean up: its namespaces bear its process id."""
    left = [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.startswith("evenstep-")]
    _remove([namespace for namespace in left if not Path("/proc", namespace.split("-")[1]).exists()])


def _remove(namespaces: Sequence[str]) -> None:
    present = {line.split()[0] for line in _run("ip", "netns", "list").splitlines()}
    for namespace in [each for each in namespaces if each in present]:
        _kill(partial(_pids, namespace))
        # Two runs may clear away the same dead one at the same time.
        with suppress(subprocess.CalledProcessError):
            _run("ip", "netns", "del", namespace)


def _kill(pids: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids() if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes {left} outlive SIGKILL"
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]


def _is_alive(pid: int) -> bool:
    """A zombie waits only for its parent to look at it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _run(*command: str, timeout_seconds: float = 30) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_seconds).stdout
