"""Files for schedulers: a Kubeflow TrainJob, a JobSet, a Slurm batch script. Each runs `evenstep train`.

They rely on what evenstep does anyway: it reads torchrun's variables or Slurm's, saves and exits with 75 on SIGTERM,
and continues with `--resume auto` in the folder of the run.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.errors import BadInput, PlanError, Preempted, shorten
from evenstep.plan import parse_devices

Document = dict[str, Any]
PORT = 29500
SAVE_SECONDS = 120
"""From the signal to the end: enough to finish a step and to write a checkpoint."""
MOST_RESTARTS = 3
MOST_CHARACTERS = 50
"""Of a name, to which Kubernetes appends what it makes of it, up to 63."""
NODE = "node"
"""Kubeflow Trainer looks for a job and a container of this name."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./=-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
"""Texts that YAML reads as something else."""


@dataclass(frozen=True)
class ClusterJob:
    """What to train, and on what."""

    name: str
    command: tuple[str, ...]
    """`evenstep train` with its arguments, except those that name the devices and the run."""
    machines: int = 1
    devices: str = "1"
    """Of each machine: a number of GPUs, or a list such as cpu,cpu."""
    cpus: int | None = None
    """Cores of each machine; None: one for each CPU device, or what the cluster gives."""
    image: str = ""
    volume: str | None = None
    """CLAIM:PATH"""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > MOST_CHARACTERS:
            raise PlanError(
                f"{shorten(repr(self.name))} cannot name a job; use up to {MOST_CHARACTERS} of a to z, 0 to 9 and '-', "
                "beginning with a to z: --name NAME"
            )
        if self.machines < 1:
            raise PlanError(f"--machines is {self.machines}; give 1 or more")
        if self.volume is not None and not re.fullmatch(r"[a-z0-9.-]+:/\S*", self.volume):
            raise PlanError(f"--volume is {shorten(repr(self.volume))}; write CLAIM:PATH, such as training:/work")
        self._kind_and_num()

    @property
    def pod_command(self) -> list[str]:
        """A pod that takes the place of another continues its run."""
        resume = [] if "--resume" in self.command else ["--resume", "auto"]
        return [*self.command, "--name", self.name, *resume]

    @property
    def num_devices(self) -> int:
        return self._kind_and_num()[1]

    @property
    def has_gpus(self) -> bool:
        return self._kind_and_num()[0] == "cuda"

    @property
    def num_cpus(self) -> int | None:
        """Cores of each machine that are requested."""
        return self.cpus if self.has_gpus or self.cpus is not None else self.num_devices

    @property
    def resources(self) -> dict[str, int]:
        """Of one machine, by Kubernetes' names."""
        gpus = {"nvidia.com/gpu": self.num_devices} if self.has_gpus else {}
        return {**gpus, **({"cpu": self.num_cpus} if self.num_cpus is not None else {})}

    def _kind_and_num(self) -> tuple[str, int]:
        devices = parse_devices(self.devices)
        names = ["cuda"] * devices if isinstance(devices, int) else [one.partition(":")[0] for one in devices]
        if len(set(names)) != 1 or names[0] not in ("cuda", "cpu"):
            raise PlanError(
                f"--devices is {shorten(repr(self.devices))}; write the GPUs of each machine, such as 4, or cpu,cpu"
            )
        return names[0], len(names)


def name_of(task: str) -> str:
    """The name of a job, from that of the task.

    >>> name_of("tasks/My_Task.py:small"), name_of("package.module:function")
    ('my-task-small', 'package-module-function')
    """
    path, _, function = task.partition(":")
    stem = path.rpartition("/")[2].removesuffix(".py")
    words = re.sub(r"[^a-z0-9]+", "-", f"{stem}-{function}".lower())
    return words.strip("-0123456789")[:MOST_CHARACTERS].rstrip("-") or "train"


def jobset(job: ClusterJob) -> str:
    """For JobSet, of Kubernetes SIGs: one pod for each machine."""
    pod = _pod(job, [*_elastic_variables(job), *_token_variable(job)])
    spec = {**_node_job(job, pod), "parallelism": job.machines, "completions": job.machines}
    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {**_restarts(), "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": spec}}]},
    }
    return _file([*_token(job), made])


def trainjob(job: ClusterJob) -> str:
    """For Kubeflow Trainer: a TrainJob, and the TrainingRuntime that says what becomes of a pod that ends."""
    # Command, image, resources and variables are the TrainJob's; Kubeflow adds torchrun's variables.
    template = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": _node_job(job, _pod(job, [])),
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.machines, "torch": {}},
            "template": {
                "spec": {**_restarts(), "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}]}
            },
        },
    }
    trainer: Document = {
        "image": job.image,
        "command": job.pod_command,
        "numNodes": job.machines,
        "numProcPerNode": job.num_devices,
        "resourcesPerNode": {"requests": job.resources, "limits": job.resources},
    }
    made = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {**trainer, **({"env": env} if (env := _token_variable(job)) else {})},
        },
    }
    return _file([*_token(job), runtime, made])


def _restarts() -> Document:
    """Start all again after a failure, up to a limit; not after bad input, which would be as bad again."""
    rule = {"name": "badInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"failurePolicy": {"maxRestarts": MOST_RESTARTS, "rules": [rule]}}


def _node_job(job: ClusterJob, pod: Document) -> Document:
    """A pod that was preempted has saved, and is replaced; it does not count as a failure."""
    exits = {"containerName": NODE, "operator": "In"}
    rules = [
        {"action": "Ignore", "onExitCodes": {**exits, "values": [Preempted.exit_code]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {**exits, "values": [BadInput.exit_code]}},
    ]
    return {
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }


def _pod(job: ClusterJob, variables: Sequence[Document]) -> Document:
    container: Document = {
        "name": NODE,
        "image": job.image,
        "command": job.pod_command,
        **({"env": list(variables)} if variables else {}),
        "ports": [{"containerPort": PORT}],
        "resources": {"requests": job.resources, "limits": job.resources},
        # Loader processes and NCCL need more shared memory than the 64 MiB of a container.
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes: list[Document] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if job.volume is not None:
        claim, _, path = job.volume.partition(":")
        container["workingDir"] = path
        container["volumeMounts"].append({"name": "work", "mountPath": path})
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": claim}})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }


def _elastic_variables(job: ClusterJob) -> list[Document]:
    """torchrun's, as Kubeflow Trainer would set them."""
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    values = {
        "PET_NNODES": str(job.machines),
        "PET_NPROC_PER_NODE": str(job.num_devices),
        "PET_MASTER_ADDR": f"{job.name}-{NODE}-0-0.{job.name}",
        "PET_MASTER_PORT": str(PORT),
    }
    return [
        {"name": "PET_NODE_RANK", "valueFrom": index},
        *({"name": name, "value": value} for name, value in values.items()),
    ]


def _token(job: ClusterJob) -> list[Document]:
    """The secret by which the pods of this run, and no others, may join it."""
    if job.machines == 1:
        return []
    data = {"token": secrets.token_hex(32)}
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{job.name}-token"}, "stringData": data}]


def _token_variable(job: ClusterJob) -> list[Document]:
    if job.machines == 1:
        return []
    secret = {"secretKeyRef": {"name": f"{job.name}-token", "key": "token"}}
    return [{"name": "EVENSTEP_TOKEN", "valueFrom": secret}]


def slurm(job: ClusterJob) -> str:
    """A batch script: `sbatch job.sh`. Options of sbatch, as --partition, may be given there."""
    cpus = [f"--cpus-per-task={job.num_cpus}"] if job.num_cpus is not None else []
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.machines}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.num_devices}"] if job.has_gpus else []),
        *cpus,
        f"--signal=USR1@{SAVE_SECONDS}",
        "--requeue",
        "--open-mode=append",
    ]
    # Since 22.05, srun does not take it from sbatch.
    command = shlex.join(["srun", *cpus, *job.command, "--devices", job.devices, "--requeue"])
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), command]) + "\n"


def _file(documents: Sequence[Document]) -> str:
    return "---\n".join("\n".join(_yaml(document)) + "\n" for document in documents)


def _yaml(value: Mapping[str, Any] | Sequence[Any], indent: str = "") -> Iterator[str]:
    """The lines of a mapping or a list, in YAML's block style."""
    items = value.items() if isinstance(value, Mapping) else ((None, one) for one in value)
    for name, one in items:
        lead = f"{indent}{_scalar(name)}:" if name is not None else f"{indent}-"
        if not isinstance(one, Mapping | list) or not one:
            yield f"{lead} {_scalar(one)}"
        elif name is None:
            first, *rest = _yaml(one, f"{indent}  ")
            yield f"{lead} {first.lstrip()}"
            yield from rest
        else:
            yield lead
            yield from _yaml(one, f"{indent}{'  ' * isinstance(one, Mapping)}")


def _scalar(value: Any) -> str:
    """JSON, which YAML contains; texts that only mean themselves stand without quotes."""
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return str(value) if is_plain else json.dumps(value)
