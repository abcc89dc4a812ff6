"""A real Slurm of one node, from Debian's packages, that lives in a folder and dies with the test.

with slurm() as cluster:
    assert cluster.run("srun", "-n2", "hostname").count("\\n") == 2
    job = cluster.submit("srun -n2 python train.py", "--signal=B:USR1@60")
    cluster.wait_until(job, "RUNNING")
    cluster.run("scontrol", "requeue", str(job))
    cluster.wait_until(job, "COMPLETED")
    print(cluster.said(job), cluster.facts(job)["Restarts"])
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ["munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "sinfo"]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

# CPUs: more than the machine has, so that `srun -n4` starts on two cores.
# cred_expire: a requeued job starts again only after so many seconds; 120 by default, 5 is the least.
# KillWait: seconds from SIGTERM to SIGKILL; 30 by default, less than 5 counts as 5.
CONFIG = """\
ClusterName=evenstep
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait={kill_wait_seconds}
JobRequeue=1
MinJobAge=600
ReturnToService=2
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
NodeName={hostname} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


@dataclass(frozen=True)
class Cluster:
    """One Slurm that is running; its commands find it through SLURM_CONF."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Ours and SLURM_CONF, without what an outer Slurm may have left in it."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**ours, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, env: Mapping[str, str] | None = None, timeout_seconds: float = 30) -> str:
        """What a command prints when it runs to its end; a failure shows what it complained about."""
        environment = {**self.environment, **(env or {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_seconds)
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str) -> int:
        """Queue a bash script for sbatch and return the number of its job."""
        file = self.folder / "job.sh"
        file.write_text(f"#!/bin/bash\n{script}\n")
        output = f"--output={self.folder}/job-%j.out"
        return int(self.run("sbatch", "--parsable", "--open-mode=append", output, *options, str(file)))

    def said(self, job: int) -> str:
        """All that the job has printed so far, over all its runs."""
        file = self.folder / f"job-{job}.out"
        return file.read_text() if file.exists() else ""

    def facts(self, job: int) -> dict[str, str]:
        """What `scontrol show job` knows: JobState, Restarts, ExitCode, Reason, NodeList and more."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(job)).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def wait_until(self, job: int, state: str, timeout_seconds: float = 30) -> None:
        """Wait for a job to be in a state; one that ends otherwise is an error that shows its output."""
        deadline = time.monotonic() + timeout_seconds
        while (now := self.facts(job)["JobState"]) != state:
            in_time = time.monotonic() < deadline and now not in ENDED
            assert in_time, f"job {job} is {now}, not {state}; {self.facts(job)}\n{self.said(job)}"
            time.sleep(0.1)

    def wait_to_say(self, job: int, words: str, timeout_seconds: float = 30) -> None:
        """Wait until the job has printed some words."""
        deadline = time.monotonic() + timeout_seconds
        while words not in self.said(job):
            assert time.monotonic() < deadline, f"job {job} never said {words!r} but: {self.said(job)}"
            time.sleep(0.1)


@contextmanager
def slurm(kill_wait_seconds: int = 5) -> Iterator[Cluster]:
    """A Slurm of one node with 8 CPUs, whatever the machine has; nothing of it runs at the end."""
    # Not pytest's folder: munged wants one that only root can write, at a path short enough for a socket.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        cluster = Cluster(Path(name))
        _write_config(cluster.folder, kill_wait_seconds)
        daemons: list[subprocess.Popen[bytes]] = []
        try:
            _start(cluster, daemons)
            yield cluster
        finally:
            _stop(cluster, daemons)


def why_no_slurm() -> str | None:
    """What this machine lacks for slurm(), or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "slurmd starts jobs only as root"
    return None


def _write_config(folder: Path, kill_wait_seconds: int) -> None:
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    controller_port, node_port = _free_ports()
    config = CONFIG.format(
        folder=folder,
        hostname=socket.gethostname().partition(".")[0],
        controller_port=controller_port,
        node_port=node_port,
        kill_wait_seconds=kill_wait_seconds,
    )
    (folder / "slurm.conf").write_text(config)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("", 0))
        second.bind(("", 0))
        return first.getsockname()[1], second.getsockname()[1]


def _start(cluster: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    folder = cluster.folder
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munged = ["munged", "--foreground", *(f"--{option}={folder}/munge.{ending}" for option, ending in files.items())]
    daemons.append(_daemon(cluster, munged))
    _wait_for((folder / "munge.socket").exists, cluster, daemons)
    daemons.append(_daemon(cluster, ["slurmctld", "-D"]))
    daemons.append(_daemon(cluster, ["slurmd", "-D"]))
    _wait_for(lambda: _node_state(cluster) == "idle", cluster, daemons)


def _daemon(cluster: Cluster, command: list[str]) -> subprocess.Popen[bytes]:
    with (cluster.folder / f"{command[0]}.log").open("wb") as output:
        return subprocess.Popen(
            command, env=cluster.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def _node_state(cluster: Cluster) -> str:
    # Fails while the controller starts up, which is not an error yet.
    asked = subprocess.run(["sinfo", "-h", "-o%T"], env=cluster.environment, capture_output=True, text=True, timeout=30)
    return asked.stdout.strip()


def _wait_for(is_ready: Callable[[], bool], cluster: Cluster, daemons: Iterable[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 30
    while not is_ready():
        alive = all(daemon.poll() is None for daemon in daemons)
        logs = "" if alive else "".join(file.read_text() for file in sorted(cluster.folder.glob("*.log")))
        assert alive, f"a daemon of Slurm ended at its start:\n{logs}"
        assert time.monotonic() < deadline, f"Slurm is not ready after 30 s; node state {_node_state(cluster)!r}"
        time.sleep(0.05)


def _stop(cluster: Cluster, daemons: Iterable[subprocess.Popen[bytes]]) -> None:
    # SIGKILL for the controller's children too: nothing here is worth a slow farewell.
    for daemon in daemons:
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()
    deadline = time.monotonic() + 10
    while left := _processes(cluster):
        assert time.monotonic() < deadline, f"processes of Slurm outlive SIGKILL: {left}"
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes(cluster: Cluster) -> set[int]:
    """All that runs of this cluster: what has SLURM_CONF from us, and slurmstepd, whose title overwrites it."""
    config = str(cluster.folder / "slurm.conf")
    told = {
        process.pid
        for process in psutil.process_iter(["environ", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        if (process.info["environ"] or {}).get("SLURM_CONF") == config
    }
    sockets = psutil.net_connections("unix")
    steps = {each.pid for each in sockets if each.pid and str(each.laddr).startswith(str(cluster.folder))}
    return told | steps
