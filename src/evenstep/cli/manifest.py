"""`evenstep manifest`: files that start a training on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from evenstep.cli.app import app, print_notes
from evenstep.errors import BadInput, shorten

if TYPE_CHECKING:
    from evenstep.clusters.job_files import ClusterJob

EXAMPLES = """
[bold]Examples[/bold]

evenstep manifest {kind} my_task.py lr=0.1 --epochs 10 --machines 2 --devices 4 {pod}> {file}

{start} {file}
"""
POD = "--image registry/me/train:1 --volume training:/work "
ON_KUBERNETES = EXAMPLES.format(kind="{kind}", pod=POD, file="job.yaml", start="kubectl apply -f")
ON_SLURM = EXAMPLES.format(kind="slurm", pod="", file="job.sh", start="sbatch --partition gpu --time 4:00:00")
NOT_PASSED = ("--machines", "--devices", "--rendezvous", "--name", "--requeue")
"""Options of a training that the file itself decides."""
PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
manifest_app = typer.Typer(help="Print a file that starts a training on a cluster.", no_args_is_help=True)
app.add_typer(manifest_app, name="manifest")

TaskToPass = Annotated[
    str,
    typer.Argument(
        metavar="TASK [NAME=VALUE]...",
        help="As for evenstep train; its options may follow, and are passed on to it in the job.",
    ),
]
NumMachines = Annotated[int, typer.Option(metavar="N", help="Number of machines.")]
DevicesOfEach = Annotated[str, typer.Option(help="Devices of each machine: a number of GPUs, or cpu,cpu.")]
JobName = Annotated[
    str | None, typer.Option(help="Name of the job, and on Kubernetes of the run; default: from the task.")
]
Image = Annotated[str, typer.Option(metavar="IMAGE", help="Container image with evenstep and the task.")]
Volume = Annotated[
    str | None,
    typer.Option(
        metavar="CLAIM:PATH",
        help="PersistentVolumeClaim that all pods mount at PATH, the working folder: runs are written there.",
    ),
]


@manifest_app.command(context_settings=PASSES_ON, epilog=ON_KUBERNETES.format(kind="trainjob"))
def trainjob(
    context: typer.Context,
    task: TaskToPass,
    image: Image,
    machines: NumMachines = 1,
    devices: DevicesOfEach = "1",
    volume: Volume = None,
    name: JobName = None,
) -> None:
    """Print a TrainJob of Kubeflow Trainer 2, with its TrainingRuntime, for kubectl apply."""
    from evenstep.clusters import job_files

    print(job_files.trainjob(_pods(_job(context, task, name, machines, devices), image, volume)), end="")


@manifest_app.command(context_settings=PASSES_ON, epilog=ON_KUBERNETES.format(kind="jobset"))
def jobset(
    context: typer.Context,
    task: TaskToPass,
    image: Image,
    machines: NumMachines = 1,
    devices: DevicesOfEach = "1",
    volume: Volume = None,
    name: JobName = None,
) -> None:
    """Print a JobSet for kubectl apply: Kubernetes without Kubeflow."""
    from evenstep.clusters import job_files

    print(job_files.jobset(_pods(_job(context, task, name, machines, devices), image, volume)), end="")


@manifest_app.command(context_settings=PASSES_ON, epilog=ON_SLURM)
def slurm(
    context: typer.Context,
    task: TaskToPass,
    machines: NumMachines = 1,
    devices: DevicesOfEach = "1",
    name: JobName = None,
) -> None:
    """Print a batch script for sbatch; other options of sbatch may be given to it."""
    from evenstep.clusters import job_files

    print(job_files.slurm(_job(context, task, name, machines, devices)), end="")


def _job(context: typer.Context, task: str, name: str | None, machines: int, devices: str) -> ClusterJob:
    """A job that runs `evenstep train` with all words that are not this command's."""
    from evenstep.clusters.job_files import ClusterJob, name_of

    if task.startswith("-"):
        raise BadInput(f"{shorten(task)} stands where the task is expected; write TASK first: my_task.py {task} ...")
    _check_training([task, *context.args])
    command = ("evenstep", "train", task, *context.args)
    return ClusterJob(name_of(task) if name is None else name, command, machines, devices)


def _check_training(words: Sequence[str]) -> None:
    """Refuse now what `evenstep train` would refuse in the job."""
    for word in words:
        if word.partition("=")[0] in NOT_PASSED:
            raise BadInput(f"{word} is not passed on to the training; see evenstep manifest --help")
    group = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), "train")  # type: ignore[attr-defined]
    with command.make_context("evenstep train", list(words)):
        pass


def _pods(job: ClusterJob, image: str, volume: str | None) -> ClusterJob:
    from dataclasses import replace

    if volume is None:
        print_notes(["without --volume CLAIM:PATH, the run and its checkpoints are lost with its pods"])
    return replace(job, image=image, volume=volume)
