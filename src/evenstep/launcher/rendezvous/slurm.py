"""Slurm, detected from its environment: `srun evenstep train ...` joins all tasks of the step into one run."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from evenstep.errors import BadInput
from evenstep.launcher.variables import SlurmVariables, slurm_variables

FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Ports are derived from the job id, so that jobs on one machine do not collide; they end below 32768, where Linux's
ephemeral ports begin.
"""


@dataclass(frozen=True)
class Slurm:
    """One task of a job step, or a batch script that runs alone."""

    job: str
    step: str | None
    """None in a batch script that did not use srun."""
    task: int
    num_tasks: int
    local: int
    num_local: int
    head: str
    num_restarts: int

    @property
    def has_several_tasks(self) -> bool:
        """Whether srun has started several tasks."""
        return self.step is not None and self.num_tasks > 1

    @property
    def rendezvous(self) -> str:
        """Where the tasks meet: on the first machine of the step."""
        return f"{self.head}:{FIRST_PORT + (int(self.job) * 31 + int(self.step or 0)) % NUM_PORTS}"

    def devices(self, num_gpus: int) -> str:
        """Default devices of a task: its own GPU where machines have several tasks, else all GPUs."""
        if self.num_local > 1:
            # Slurm may show a task its own GPU alone, or all GPUs to all tasks.
            return f"cuda:{self.local if self.local < num_gpus else 0}" if num_gpus else "cpu"
        return str(max(1, num_gpus))

    def requeue(self) -> str:
        """Requeue the job; return a line about it."""
        try:
            done = subprocess.run(["scontrol", "requeue", self.job], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the job could not be requeued: {error}"
        return f"job {self.job} is requeued" if done.returncode == 0 else f"scontrol: {done.stderr.strip()}"


def find_slurm(given: SlurmVariables | None = None) -> Slurm | None:
    """The job that this process belongs to."""
    given = given or slurm_variables()
    if given.SLURM_JOB_ID is None:
        return None
    if given.SLURM_PROCID >= given.SLURM_STEP_NUM_TASKS and given.SLURM_STEP_ID is not None:
        raise BadInput(
            f"the variable SLURM_PROCID is {given.SLURM_PROCID} and SLURM_STEP_NUM_TASKS is "
            f"{given.SLURM_STEP_NUM_TASKS}; start this with srun, or unset Slurm's variables"
        )
    return Slurm(
        job=str(given.SLURM_JOB_ID),
        # A batch script has SLURM_PROCID, too; only processes started by srun have a step.
        step=None if given.SLURM_STEP_ID is None else str(given.SLURM_STEP_ID),
        task=given.SLURM_PROCID,
        num_tasks=given.SLURM_STEP_NUM_TASKS,
        local=given.SLURM_LOCALID,
        num_local=_tasks_here(given.SLURM_STEP_TASKS_PER_NODE, given.SLURM_NODEID),
        head=first_node(given.SLURM_STEP_NODELIST or given.SLURM_JOB_NODELIST) or "127.0.0.1",
        num_restarts=given.SLURM_RESTART_COUNT,
    )


def first_node(nodes: str) -> str:
    """`gpu` of `gpu[03-05,9],login`: `gpu03`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else ""


def _tasks_here(tasks: str, node: int) -> int:
    """The number of tasks on one node, from `2(x3),1`."""
    for num, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        node -= int(repeated or 1)
        if node < 0:
            return int(num)
    return 1
