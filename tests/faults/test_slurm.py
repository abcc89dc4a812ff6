"""Trainings under a real Slurm: `srun` makes one run of its tasks, a job that is queued again goes on where it was."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from evenstep.audit import audit
from evenstep.record import Record
from tests.faults.slurm_cluster import Cluster
from tests.faults.test_machines import TASK
from tests.fleet import newest_weights
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

EVENSTEP = f"{shlex.quote(sys.executable)} -m evenstep"
GOES_ON = "--strategy ddp --epochs 5 --audit --requeue"


@pytest.fixture(autouse=True)
def _task(cluster: Cluster, tmp_path: Path) -> None:
    Path("my_task.py").write_text(TASK)


def srun(cluster: Cluster, num: int, *arguments: str) -> str:
    """What `srun -nN evenstep ...` prints to both streams."""
    command = f"srun -n{num} {EVENSTEP} {shlex.join(arguments)} 2>&1"
    return cluster.run("sh", "-c", command, timeout_seconds=90)


def the_run() -> Path:
    """The one run that there is."""
    (run,) = Path("runs").iterdir()
    return run


def test_tasks_of_srun_train_one_run(cluster: Cluster) -> None:
    said = srun(cluster, 2, "train", "my_task.py", "--strategy", "ddp", "--audit")
    assert "2 machines, 2 processes; this is machine 1" in said
    assert said.count("valid loss") == 1, "one task tells of the training"
    run = the_run()
    assert "my_task-job" in run.name
    assert Record.read(run).summary.steps == 20
    assert audit([run]).is_clean
    here = f"{EVENSTEP} train my_task.py --devices 2 --name alone"
    cluster.run("sh", "-c", here, timeout_seconds=60)
    many, one = newest_weights(run), newest_weights(Path("runs/alone"))
    assert all(torch.equal(many[name], one[name]) for name in one)


def test_four_tasks_of_one_machine_train_one_run(cluster: Cluster) -> None:
    srun(cluster, 4, "train", "my_task.py", "--strategy", "ddp", "--audit", "--steps", "4")
    record = Record.read(the_run())
    assert [step.step for step in record.steps] == [1, 2, 3, 4]
    assert record.summary.audit["repeated"] == 0


def test_a_task_that_comes_late_to_a_folder_that_is_there_already_is_no_other_run(cluster: Cluster) -> None:
    """The name of a run is derived from which folders exist, and the first task makes one."""
    late = f"[ $SLURM_PROCID = 0 ] || until [ -d runs ]; do sleep 0.1; done; exec {EVENSTEP} train my_task.py"
    cluster.run("srun", "-n2", "sh", "-c", f"{late} --strategy ddp", timeout_seconds=60)
    assert Record.read(the_run()).summary.steps == 20


def test_tasks_that_share_no_folder_know_each_other_by_munge(cluster: Cluster, tmp_path: Path) -> None:
    """Nothing is set, and nothing can be read by others: the first task's token is sealed for the job's user."""
    for name in ("munge", "unmunge"):
        program = tmp_path / "programs" / name
        program.parent.mkdir(exist_ok=True)
        # The cluster's own socket is not where Debian's would be.
        program.write_text(f'#!/bin/sh\nexec {shutil.which(name)} --socket={cluster.folder}/munge.socket "$@"\n')
        program.chmod(0o755)
    own = "mkdir -p own$SLURM_PROCID && cp my_task.py own$SLURM_PROCID && cd own$SLURM_PROCID"
    path = {"PATH": f"{tmp_path / 'programs'}:{os.environ['PATH']}"}
    command = f"{own} && exec {EVENSTEP} train my_task.py --strategy ddp"
    cluster.run("srun", "-n2", "sh", "-c", command, env=path, timeout_seconds=90)
    (run,) = Path("own0/runs").iterdir()
    assert Record.read(run).summary.steps == 20


def test_a_single_task_is_a_plain_run(cluster: Cluster) -> None:
    said = srun(cluster, 1, "train", "my_task.py")
    assert "machines" not in said
    assert Record.read(the_run()).plan.strategy == "single"


def test_a_batch_script_without_srun_is_a_plain_run_however_many_tasks_it_has(cluster: Cluster) -> None:
    job = cluster.submit(f"cd {Path.cwd()}; {EVENSTEP} train my_task.py --devices 2", "-n4")
    cluster.wait_until(job, "COMPLETED", timeout_seconds=60)
    assert "machines" not in cluster.said(job)
    record = Record.read(the_run())
    assert (record.plan.strategy, len(record.plan.devices)) == ("ddp", 2)


def test_two_jobs_at_once_do_not_meet(cluster: Cluster) -> None:
    script = f"cd {Path.cwd()}; srun -n2 {EVENSTEP} train my_task.py --strategy ddp --audit"
    jobs = [cluster.submit(script, "-n2") for _ in range(2)]
    for job in jobs:
        cluster.wait_until(job, "COMPLETED", timeout_seconds=90)
        (run,) = Path("runs").glob(f"*job{job}")
        assert audit([run]).is_clean
        assert Record.read(run).summary.steps == 20


@pytest.mark.smoke
def test_a_task_that_fails_ends_the_job_with_its_cause(cluster: Cluster) -> None:
    fails = "export FAILS=$(hostname)"
    job = cluster.submit(f"cd {Path.cwd()}; {fails}; srun -n2 {EVENSTEP} train my_task.py --strategy ddp", "-n2")
    cluster.wait_until(job, "FAILED", timeout_seconds=60)
    assert cluster.facts(job)["ExitCode"] == "1:0"
    assert "ValueError: the sky is falling" in cluster.said(job)


@pytest.mark.parametrize("tasks", [0, 2])
@pytest.mark.parametrize("how", ["USR1", "requeue"])
def test_a_job_that_is_asked_to_stop_is_queued_again_and_goes_on(cluster: Cluster, tasks: int, how: str) -> None:
    """`--signal=USR1@60` sends USR1 to the tasks; `scontrol requeue`, as a preemption, sends TERM to everything."""
    begin = f"srun -n{tasks}" if tasks else "exec"
    script = f"cd {Path.cwd()}; export STEP_SECONDS=0.2; {begin} {EVENSTEP} train my_task.py {GOES_ON}"
    job = cluster.submit(script, f"-n{tasks or 1}", "--requeue")
    wait_until(lambda: has_taken(job, 7), 60)
    if how == "USR1":
        cluster.run("scancel", "--signal=USR1", *([] if tasks else ["--batch"]), str(job))
        cluster.wait_to_say(job, f"job {job} is requeued")
    else:
        cluster.run("scontrol", "requeue", str(job))
    cluster.wait_to_say(job, "stopped; continue from step-")
    cluster.wait_until(job, "COMPLETED", timeout_seconds=90)
    run = the_run()
    record = Record.read(run)
    assert cluster.facts(job)["Restarts"] == "1"
    assert [step.step for step in record.steps] == list(range(1, 51))
    assert len(record.restarts) == 1
    found = audit([run])
    assert found.is_clean
    assert (found.samples, found.repeated, found.missed, found.redone) == (300, 0, 0, 0)


def has_taken(job: int, step: int) -> bool:
    files = list(Path("runs").glob(f"*job{job}/record.jsonl"))
    return bool(files) and f'"step": {step},' in files[0].read_text()


def test_without_requeue_a_job_that_is_asked_to_stop_ends_with_75(cluster: Cluster) -> None:
    script = f"cd {Path.cwd()}; export STEP_SECONDS=0.2; exec {EVENSTEP} train my_task.py --devices 2 --epochs 9"
    job = cluster.submit(script)
    wait_until(lambda: has_taken(job, 7), 60)
    cluster.run("scancel", "--signal=USR1", "--batch", str(job))
    cluster.wait_until(job, "FAILED", timeout_seconds=30)
    assert cluster.facts(job)["ExitCode"] == "75:0"
    assert "with --resume runs/" in cluster.said(job)
