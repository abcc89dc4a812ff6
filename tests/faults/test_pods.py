"""Pods of a TrainJob or JobSet, as two machines with the variables that Kubernetes gives them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenstep.audit import audit
from tests.faults.hosts import why_no_hosts
from tests.faults.slurm_cluster import Cluster
from tests.faults.test_machines import TASK, Machine, assert_ends, machines
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture
def _needs_hosts() -> None:
    if missing := why_no_hosts():
        pytest.skip(missing)


def variables(first: Machine, rank: int) -> dict[str, str]:
    """As Kubeflow Trainer sets them in the pod of this index."""
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": first.host.name,
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(rank),
    }


def start(pods: list[Machine], *options: str, **more: str) -> None:
    """The command of a manifest, in each pod; the second one comes first."""
    for rank in (1, 0):
        words = ["train", "my_task.py", "--audit", *options, "--name", "many", "--resume", "auto"]
        pods[rank].evenstep(*words, **variables(pods[0], rank), **more)


@pytest.mark.usefixtures("_needs_hosts")
def test_pods_train_what_one_machine_with_two_devices_trains(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as pods:
        start(pods)
        for pod in pods:
            assert_ends(pod, 0, 60, "2 machines, 2 processes")
        assert pods[0].is_audited_clean()
        pods[0].evenstep("train", "my_task.py", "--devices", "2", "--name", "alone")
        assert_ends(pods[0], 0, 60)
        many, alone = pods[0].weights(), pods[0].weights("alone")
        assert all(torch.equal(many[name], alone[name]) for name in alone)
        # Kubernetes may start a pod again that has done its work.
        start(pods)
        for pod in pods:
            assert_ends(pod, 0, 60)
        again = pods[0].weights()
        assert all(torch.equal(many[name], again[name]) for name in again)
        assert pods[0].is_audited_clean()


@pytest.mark.usefixtures("_needs_hosts")
def test_evicted_pods_exit_with_75_and_their_successors_continue(tmp_path: Path) -> None:
    """The kubelet sends SIGTERM to one pod; all of them save, and all are replaced, as podFailurePolicy says."""
    with machines(tmp_path, 2) as pods:
        start(pods, "--epochs", "6", STEP_SECONDS="0.1")
        wait_until(lambda: pods[0].has_taken(7))
        os.kill(pods[1].launcher.inner, signal.SIGTERM)
        for pod in pods:
            assert_ends(pod, 75, 30)
        start(pods, "--epochs", "6")
        assert_ends(pods[0], 0, 60, "continuing from step-")
        assert_ends(pods[1], 0, 60)
        assert pods[0].is_audited_clean(epochs=6)


def test_a_launcher_that_is_process_1_of_its_container_saves_on_sigterm(tmp_path: Path) -> None:
    """Linux ignores signals to a process 1 that has no handler."""
    own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0 or subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("a process namespace needs root")
    (tmp_path / "my_task.py").write_text(TASK)
    words = ["train", "my_task.py", "--devices", "2", "--epochs", "50", "--name", "mine"]
    command = [*own, sys.executable, "-m", "evenstep", *words]
    environment = {**os.environ, "STEP_SECONDS": "0.1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as outer:
        record = tmp_path / "runs/mine/record.jsonl"
        wait_until(lambda: record.exists() and '"step": 3,' in record.read_text())
        (first,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        said = outer.communicate(timeout=60)[1]
    assert outer.returncode == 75, said
    assert "continue from step-" in said


def test_a_batch_script_that_was_printed_runs_on_slurm(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    words = ["manifest", "slurm", "my_task.py", "--audit", "--devices", "cpu,cpu"]
    made = subprocess.run([sys.executable, "-m", "evenstep", *words], capture_output=True, text=True, check=True)
    here = made.stdout.replace(" evenstep train ", f" {shlex.quote(sys.executable)} -m evenstep train ")
    Path("job.sh").write_text(here)
    output = f"--output={cluster.folder}/job-%j.out"
    job = int(cluster.run("sbatch", "--parsable", output, f"--chdir={tmp_path}", "job.sh"))
    cluster.wait_until(job, "COMPLETED", timeout_seconds=90)
    (run,) = Path("runs").iterdir()
    assert audit([run]).is_clean
    assert run.name == f"my_task-job{job}"
