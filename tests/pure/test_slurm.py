"""What Slurm's environment says."""

from __future__ import annotations

import pytest

from evenstep.launcher.rendezvous.slurm import find_slurm, first_node
from evenstep.launcher.variables import slurm_variables

# As set by Slurm 22.05 for task 1 of `srun -n3` over two machines; a batch script has no step.
TASK = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "cpu1,gpu[03-05]",
}
BATCH = {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "gpu[03-05]"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1", "a1"),
        ("a1,a2", "a1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("n[1-2]-ib", "n1-ib"),
        ("n[1-2]-ib,login", "n1-ib"),
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("login,gpu[03-05]", "login"),
        ("", ""),
    ],
)
def test_the_first_machine_of_a_list_is_found(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_a_task_that_srun_started_is_part_of_one_run() -> None:
    slurm = find_slurm(slurm_variables(TASK))
    assert slurm is not None
    assert slurm.has_several_tasks
    assert (slurm.task, slurm.num_tasks, slurm.local, slurm.num_local) == (1, 3, 1, 2)
    assert slurm.rendezvous.startswith("gpu03:")
    assert slurm.num_restarts == 0


@pytest.mark.parametrize(("node", "num_local"), [(0, 2), (1, 2), (2, 2), (3, 1), (4, 1)])
def test_tasks_are_counted_machine_by_machine(node: int, num_local: int) -> None:
    slurm = find_slurm(slurm_variables({**TASK, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": str(node)}))
    assert slurm is not None
    assert slurm.num_local == num_local


def test_tasks_of_one_job_meet_at_one_port_and_those_of_others_at_another() -> None:
    ports = {}
    for job, step, task in [("71", "2", "0"), ("71", "2", "1"), ("71", "3", "0"), ("72", "2", "0")]:
        slurm = find_slurm(slurm_variables({**TASK, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": task}))
        assert slurm is not None
        ports[job, step, task] = int(slurm.rendezvous.rpartition(":")[2])
    assert ports["71", "2", "0"] == ports["71", "2", "1"]
    assert len(set(ports.values())) == 3
    assert all(1024 < port < 65536 for port in ports.values())


def test_a_batch_script_runs_alone_however_many_tasks_its_job_may_start() -> None:
    slurm = find_slurm(slurm_variables(BATCH))
    assert slurm is not None
    assert not slurm.has_several_tasks


@pytest.mark.parametrize("tasks", ["1", ""])
def test_a_single_task_runs_alone(tasks: str) -> None:
    slurm = find_slurm(slurm_variables({**TASK, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": tasks}))
    assert slurm is not None
    assert not slurm.has_several_tasks


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": ""}, {"SLURM_CONF": "/etc/slurm.conf"}])
def test_elsewhere_there_is_no_slurm(environment: dict[str, str]) -> None:
    assert find_slurm(slurm_variables(environment)) is None


def test_a_requeued_job_knows_how_often_it_was_started() -> None:
    slurm = find_slurm(slurm_variables({**BATCH, "SLURM_RESTART_COUNT": "2"}))
    assert slurm is not None
    assert slurm.num_restarts == 2


@pytest.mark.parametrize(
    ("per_node", "local", "num_gpus", "devices"),
    [
        ("2", 1, 2, "cuda:1"),  # all cards are shown to all tasks
        ("2", 1, 1, "cuda:0"),  # --gpus-per-task=1: each task sees its own
        ("1", 0, 4, "4"),  # one task drives all cards of its machine
        ("2", 1, 0, "cpu"),
        ("1", 0, 0, "1"),
    ],
)
def test_a_task_drives_its_own_gpu_or_all_of_its_machine(
    per_node: str, local: int, num_gpus: int, devices: str
) -> None:
    slurm = find_slurm(slurm_variables({**TASK, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_LOCALID": str(local)}))
    assert slurm is not None
    assert slurm.devices(num_gpus) == devices
