"""The Slurm that fault tests run under behaves as users' clusters do."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from tests.faults.slurm_cluster import Cluster, slurm, why_no_slurm

pytestmark = pytest.mark.slow

# A task that tells which signals reach it, and ends by SIGTERM.
LISTEN = f"""{sys.executable} -c '
import os, signal, time
me = os.environ["SLURM_PROCID"] + " in run " + os.environ.get("SLURM_RESTART_COUNT", "0")
say = lambda words: os.write(1, ("task " + me + " " + words + "\\n").encode())
signal.signal(signal.SIGUSR1, lambda *_: say("got USR1"))
signal.signal(signal.SIGTERM, lambda *_: (say("got TERM"), os._exit(0)))
say("is up")
time.sleep(60)
'"""


@pytest.mark.parametrize("num_tasks", [2, 4])
def test_srun_starts_as_many_tasks_as_asked_each_with_its_rank(cluster: Cluster, num_tasks: int) -> None:
    said = cluster.run("srun", f"-n{num_tasks}", "sh", "-c", "echo $SLURM_PROCID of $SLURM_NTASKS, $SLURM_LOCALID here")
    assert sorted(said.splitlines()) == [f"{rank} of {num_tasks}, {rank} here" for rank in range(num_tasks)]


def test_a_batch_job_runs_its_steps_and_shows_a_failure(cluster: Cluster) -> None:
    works = cluster.submit("echo $SLURM_JOB_ID; srun -n2 sh -c 'echo rank $SLURM_PROCID'", "-n2")
    fails = cluster.submit("exit 3")
    cluster.wait_until(works, "COMPLETED")
    assert sorted(cluster.said(works).splitlines()) == [str(works), "rank 0", "rank 1"]
    cluster.wait_until(fails, "FAILED")
    assert cluster.facts(fails)["ExitCode"] == "3:0"


def test_a_signal_reaches_the_tasks_and_a_cancel_ends_them(cluster: Cluster) -> None:
    job = cluster.submit(f"srun -n2 {LISTEN}", "-n2")
    wait_for_both(cluster, job, "in run 0 is up")
    cluster.run("scancel", "--signal=USR1", str(job))
    wait_for_both(cluster, job, "in run 0 got USR1")
    cluster.run("scancel", str(job))
    wait_for_both(cluster, job, "in run 0 got TERM")
    cluster.wait_until(job, "CANCELLED")


def test_the_batch_script_is_warned_before_its_time_limit(cluster: Cluster) -> None:
    # Slurm looks at time limits every 30 s: the warning comes then, early rather than late.
    script = "trap 'echo warned; exit 0' USR1; echo ready; sleep 60 & wait"
    job = cluster.submit(script, "--time=1", "--signal=B:USR1@60")
    cluster.wait_until(job, "COMPLETED", timeout_seconds=60)
    assert cluster.said(job).startswith("ready\nwarned\n")


def test_a_requeued_job_runs_again_and_counts(cluster: Cluster) -> None:
    job = cluster.submit(f"srun -n2 {LISTEN}", "-n2")
    wait_for_both(cluster, job, "in run 0 is up")
    cluster.run("scontrol", "requeue", str(job))
    wait_for_both(cluster, job, "in run 0 got TERM")
    wait_for_both(cluster, job, "in run 1 is up")
    assert cluster.facts(job)["Restarts"] == "1"
    cluster.run("scancel", str(job))


def test_nothing_runs_once_it_is_over() -> None:
    if missing := why_no_slurm():
        pytest.skip(missing)
    before = set(psutil.pids())
    with pytest.raises(ZeroDivisionError), slurm() as cluster:
        cluster.wait_to_say(cluster.submit("trap '' TERM; echo up; setsid sleep 300 & sleep 300"), "up")
        raise ZeroDivisionError
    assert not cluster.folder.exists()
    assert not [each for each in psutil.process_iter() if each.pid not in before and is_of(each, cluster)]
    assert "SLURM_CONF" not in os.environ


def is_of(process: psutil.Process, cluster: Cluster) -> bool:
    """Whether a process that still runs belongs to the cluster, by its name or by its environment."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return str(cluster.folder) in str(process.environ()) or process.name() in ("slurmstepd", "slurm_script")
    except psutil.NoSuchProcess:
        return False


def wait_for_both(cluster: Cluster, job: int, words: str) -> None:
    for rank in (0, 1):
        cluster.wait_to_say(job, f"task {rank} {words}")
