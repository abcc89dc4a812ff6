"""`evenstep manifest`: files that start a training run on a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenstep.cli.app import Group, Verbs, app, fields_as_options, print_notes
from evenstep.cli.settings import TaskArguments, choose_task
from evenstep.errors import BadInput, TaskError, shorten
from evenstep.strategy_facts import STRATEGIES
from evenstep.task import Task, TaskFunction, find_task, split_spec
from evenstep.task_options import read_options
from evenstep.typed_values import check_choice

if TYPE_CHECKING:
    from evenstep.clusters.manifests import ClusterJob

EXAMPLES = """
[bold]Examples[/bold]

evenstep manifest {kind} my_task.py lr=0.1 --epochs 10 --machines 2 --devices 4 {pod}> {file}

{start} {file}
"""
POD = "--image registry/me/train:1 --volume training:/work "
ON_KUBERNETES = EXAMPLES.format(kind="{kind}", pod=POD, file="job.yaml", start="kubectl apply -f")
ON_SLURM = EXAMPLES.format(kind="slurm", pod="", file="job.sh", start="sbatch --partition gpu --time 4:00:00")
OF_FILES = {name: f"write {name} before --: the generated file sets it" for name in ("--machines", "--devices")}
NOT_IN_PODS = {
    **OF_FILES,
    "--name": "write --name before --: it names both the job and the run",
    "--rendezvous": "leave --rendezvous out: pods find each other by torchrun's variables",
}
NOT_UNDER_SLURM = {
    **OF_FILES,
    "--name": "leave --name out: under Slurm, a run is named after its task and its job: each job has its own",
    "--rendezvous": "leave --rendezvous out: under Slurm, evenstep finds the first node of the job",
}
"""Options of `evenstep train` that are not passed on, and what to do instead."""
OF_PODS = ("--image", "--volume")
"""Options of files for Kubernetes alone."""
PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
manifest_app = Verbs(cls=Group, help="Print a job file for Kubernetes or Slurm.", no_args_is_help=True)
app.add_typer(manifest_app, name="manifest")

TaskToPass = Annotated[
    str,
    typer.Argument(
        metavar="TASK [NAME=VALUE]...",
        help="As for evenstep train, whose options may follow: the job passes them on.",
    ),
]
NumCpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="CPU cores per machine, DataLoader workers included; default: one per CPU device, and with GPUs the "
        "cluster's default.",
    ),
]
NumMachines = Annotated[int, typer.Option(metavar="N", help="Number of machines.")]
DevicesOfEach = Annotated[
    str, typer.Option(metavar="N|LIST", help="Devices per machine: a number of GPUs, or cpu,cpu.")
]
JobName = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="Name of the job, and on Kubernetes also of the run; default: the task's."
    ),
]
Image = Annotated[str, typer.Option("--image", metavar="IMAGE", help="Container image with evenstep and the task.")]
Volume = Annotated[
    str | None,
    typer.Option(
        metavar="CLAIM:PATH",
        help="PersistentVolumeClaim to mount at PATH, the working directory of all pods; runs are written there.",
    ),
]


@dataclass(frozen=True)
class KubernetesOptions:
    """Arguments and options of `evenstep manifest trainjob` and `jobset`."""

    task: TaskToPass
    image: Image
    machines: NumMachines = 1
    devices: DevicesOfEach = "1"
    cpus: NumCpus = None
    volume: Volume = None
    name: JobName = None


@dataclass(frozen=True)
class SlurmOptions:
    """Arguments and options of `evenstep manifest slurm`."""

    task: TaskToPass
    machines: NumMachines = 1
    devices: DevicesOfEach = "1"
    cpus: NumCpus = None
    name: JobName = None


@manifest_app.command(context_settings=PASSES_ON, epilog=ON_KUBERNETES.format(kind="trainjob"))
@fields_as_options
def trainjob(context: typer.Context, given: KubernetesOptions) -> None:
    """Print a TrainJob of Kubeflow Trainer 2, with its TrainingRuntime, for kubectl apply."""
    from evenstep.clusters import manifests

    print(manifests.trainjob(_pods(context, given)), end="")


@manifest_app.command(context_settings=PASSES_ON, epilog=ON_KUBERNETES.format(kind="jobset"))
@fields_as_options
def jobset(context: typer.Context, given: KubernetesOptions) -> None:
    """Print a JobSet for kubectl apply: Kubernetes without Kubeflow."""
    from evenstep.clusters import manifests

    print(manifests.jobset(_pods(context, given)), end="")


@manifest_app.command(context_settings=PASSES_ON, epilog=ON_SLURM)
@fields_as_options
def slurm(context: typer.Context, given: SlurmOptions) -> None:
    """Print a batch script; give sbatch any other options, such as --partition, when you submit it."""
    from evenstep.clusters import manifests

    print(manifests.slurm(_job(context, given)), end="")


def _pods(context: typer.Context, given: KubernetesOptions) -> ClusterJob:
    job = _job(context, given)
    if given.volume is None:
        print_notes(["without --volume CLAIM:PATH, the run and its checkpoints are lost with its pods"])
    return replace(job, image=given.image, volume=given.volume)


def _job(context: typer.Context, given: KubernetesOptions | SlurmOptions) -> ClusterJob:
    """A job that runs `evenstep train` with all words that are not this command's."""
    from evenstep.clusters.manifests import ClusterJob, name_of

    task = given.task
    if task.startswith("-"):
        raise BadInput(f"expected TASK, found {shorten(task)}; write TASK first: my_task.py {task} ...")
    _check_training([task, *context.args], NOT_UNDER_SLURM if isinstance(given, SlurmOptions) else NOT_IN_PODS)
    command = ("evenstep", "train", task, *context.args)
    name = name_of(task) if given.name is None else given.name
    return ClusterJob(name, command, given.machines, given.devices, cpus=given.cpus)


def _check_training(words: Sequence[str], not_passed: Mapping[str, str]) -> None:
    """Refuse now what `evenstep train` would refuse in the job."""
    for word in words:
        name = word.partition("=")[0]
        if name in OF_PODS:
            raise BadInput(f"{name} is an option of evenstep manifest jobset and trainjob; Slurm has no images")
        if name == "--requeue":
            raise BadInput("leave --requeue out: the script for Slurm has it already, and Kubernetes replaces pods")
        if name in not_passed:
            raise BadInput(not_passed[name])
    group = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), "train")  # type: ignore[attr-defined]
    with command.make_context("evenstep train", list(words)) as context:
        _check_task(context.params)


def _check_task(given: Mapping[str, Any]) -> None:
    """The options of the task, where it can be imported here, and the strategy, which its file may add."""
    spec, options = choose_task(TaskArguments(given["task"], given["options"], given["settings"]))
    assert spec is not None
    source, why_not = _find(spec)
    if given["strategy"] is not None:
        check_choice("strategy", given["strategy"], STRATEGIES, BadInput)
    if source is not None:
        read_options(source, options or {})
    else:
        print_notes([f"the options of {spec} are not checked: {why_not}"])


def _find(spec: str) -> tuple[TaskFunction | Task | None, str]:
    """The task; or None, and why it cannot be had here, though it may be in the job."""
    where, _ = split_spec(spec)
    if where.endswith(".py") and not os.path.isfile(where):
        return None, f"there is no file {where} here"
    try:
        # Standard output is the file for the cluster: nothing that the task prints may be in it.
        with redirect_stdout(sys.stderr):
            return find_task(spec), ""
    except TaskError as error:
        # Packages and GPUs that it imports or looks for may be on the cluster alone.
        if error.__cause__ is None or isinstance(error.__cause__, SyntaxError):
            raise
        return None, str(error)
