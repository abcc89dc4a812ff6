"""Slurm, found from its environment: `srun evenstep train ...` makes every task of the step a part of one run."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Ports are derived from the number of the job, so that jobs on one machine do not meet; they end below 32768, where
Linux begins to give them away.
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
    def is_spread(self) -> bool:
        """Whether srun has started several tasks."""
        return self.step is not None and self.num_tasks > 1

    @property
    def rendezvous(self) -> str:
        """Where the tasks meet: on the first machine of the step."""
        return f"{self.head}:{FIRST_PORT + (int(self.job) * 31 + int(self.step or 0)) % NUM_PORTS}"

    def devices(self, num_cards: int) -> str:
        """What a task drives that was not told: its own card where machines have several tasks, or all there are."""
        if self.num_local > 1:
            # Slurm may show a task its own card alone, or all cards to all tasks.
            return f"cuda:{self.local if self.local < num_cards else 0}" if num_cards else "cpu"
        return str(max(1, num_cards))

    def requeue(self) -> str:
        """Queue the job again; what there is to say about it."""
        try:
            done = subprocess.run(["scontrol", "requeue", self.job], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the job could not be queued again: {error}"
        return f"job {self.job} is queued again" if done.returncode == 0 else f"scontrol: {done.stderr.strip()}"


def find_slurm(environment: Mapping[str, str] = os.environ) -> Slurm | None:
    """The job that this process belongs to."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return None
    # A batch script by itself has SLURM_PROCID, too; only what srun has started has a step.
    step = environment.get("SLURM_STEP_ID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")

    def number(name: str, default: int) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else default

    return Slurm(
        job=job,
        step=step if step and step.isdigit() else None,
        task=number("SLURM_PROCID", 0),
        num_tasks=number("SLURM_STEP_NUM_TASKS", 1),
        local=number("SLURM_LOCALID", 0),
        num_local=_tasks_here(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"), number("SLURM_NODEID", 0)),
        head=first_node(nodes) or "127.0.0.1",
        num_restarts=number("SLURM_RESTART_COUNT", 0),
    )


def first_node(nodes: str) -> str:
    """`gpu` of `gpu[03-05,9],login`: `gpu03`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else ""


def _tasks_here(tasks: str, node: int) -> int:
    """The part of `2(x3),1` that belongs to a machine."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else 1
