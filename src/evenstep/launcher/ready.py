"""From a command to a run that can be started here: alone, as one machine of several, or as a task of Slurm's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Union

import torch

from evenstep import checkpoint
from evenstep.errors import CheckpointError, EvenstepError, PlanError
from evenstep.launcher.identity import Identity, identity_of, sources_of_task
from evenstep.launcher.meeting import Meeting, OneMachine
from evenstep.launcher.prepare import RUNS, Prepared, go_on, label_of, prepare
from evenstep.launcher.slurm import Slurm, find_slurm
from evenstep.plan import parse_address, parse_machines, read_plan
from evenstep.task import Task, TaskFunction
from evenstep.worker.lifeline import read_rank

Source = Union[str, "TaskFunction", Task, None]
OWN = ("devices",)
"""Choices that may differ between the machines of one run."""


@dataclass(frozen=True)
class Ready:
    """A run, and how its launchers meet."""

    prepared: Prepared
    meeting: Meeting
    is_first: bool = True
    """Whether this launcher is the one that shows the training and has its Record."""
    slurm: Slurm | None = None


def get_ready(source: Source, choices: Mapping[str, Any]) -> Ready:
    """Check everything, and meet the other machines if there are any."""
    # What no worker could read is refused before there is one.
    read_rank()
    slurm = find_slurm()
    chosen = dict(choices) if slurm is None else _for_slurm(slurm, source, choices)
    if chosen.get("requeue") and slurm is None:
        raise PlanError("--requeue is for jobs of Slurm, and this is none; --restarts goes on after a crash")
    if chosen.get("machines") is None:
        return Ready(_again(source, chosen, slurm) or prepare(source, chosen), OneMachine(), slurm=slurm)
    return _with_machines(source, chosen, slurm, _identity(source, choices, slurm))


def _identity(source: Source, choices: Mapping[str, Any], slurm: Slurm | None) -> Identity:
    """What tells one run from another, and is the same on all machines of one: the command, the job and the code.

    Not what was derived from them: the name of the run depends on which folders there are already.
    """
    given = {name: str(value) for name, value in choices.items() if value is not None and name not in OWN}
    job = {"job": f"{slurm.job}.{slurm.step}"} if slurm is not None else {}
    command = {"command": "train", "task": str(source), **given, **job}
    sources = sources_of_task(source) if isinstance(source, str) else {}
    return identity_of(command, sources)


def _with_machines(source: Source, chosen: dict[str, Any], slurm: Slurm | None, identity: Identity) -> Ready:
    from evenstep.launcher.machines import Machines  # what it imports is not needed on one machine

    address, machines = _checked(chosen)
    is_head = slurm.task == 0 if slurm is not None and slurm.is_spread else None
    meeting = Machines(address, machines, identity, is_head)
    try:
        if not meeting.is_head:
            return Ready(go_on(meeting.read_plan(), source, chosen), meeting, is_first=False, slurm=slurm)
        prepared = _again(source, chosen, slurm) or prepare(source, chosen)
        if prepared.spec is None:
            raise PlanError("on many machines a task comes from a file or a module, as in evenstep train my_task.py")
    except EvenstepError as error:
        if meeting.is_head:
            meeting.refuse(str(error))
        meeting.close()
        raise
    meeting.publish(prepared.plan)
    said = [*prepared.said, *meeting.said]
    return Ready(replace(prepared, said=said), meeting, slurm=slurm)


def _checked(chosen: Mapping[str, Any]) -> tuple[tuple[str, int], tuple[int, int]]:
    if chosen.get("rendezvous") is None:
        raise PlanError("--machines and --rendezvous go together: --machines 2:4 --rendezvous head:29400")
    return parse_address(str(chosen["rendezvous"])), parse_machines(str(chosen["machines"]))


def _for_slurm(slurm: Slurm, source: Source, choices: Mapping[str, Any]) -> dict[str, Any]:
    """What Slurm's environment says, where the user has not said something else."""
    chosen = {name: value for name, value in choices.items() if value is not None}
    if source is not None:
        chosen.setdefault("name", _job_name(slurm, label_of(source)))
    if slurm.is_spread:
        chosen.setdefault("machines", str(slurm.num_tasks))
        chosen.setdefault("rendezvous", slurm.rendezvous)
        chosen.setdefault("devices", slurm.devices(torch.cuda.device_count()))
    return chosen


def _job_name(slurm: Slurm, label: str) -> str:
    """Of the run that this job began when it was first started; a new one for every other training in the job."""
    stem = f"{label}-job{slurm.job}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    taken = [name for name in names if (RUNS / name).exists()]
    if slurm.num_restarts and taken:
        return taken[-1]
    return next(name for name in names if name not in taken)


def _again(source: Source, chosen: Mapping[str, Any], slurm: Slurm | None) -> Prepared | None:
    """A job that was queued again goes on in the folder that it began; None if there is none."""
    folder = RUNS / str(chosen.get("name", ""))
    if slurm is None or not slurm.num_restarts or not os.path.isfile(folder / "plan.json"):
        return None
    prepared = go_on(read_plan(folder), source, chosen)
    try:
        resume, said = checkpoint.find(str(folder))
    except CheckpointError:
        return prepared
    return replace(prepared, resume=str(resume), said=[*said, f"going on from {resume.name} of {folder}"])
