"""The environment variables that the launcher reads or sets; workers read theirs in distributed/worker_process.py."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from evenstep.typed_values import Natural, Positive, read_variables

TOKEN = "EVENSTEP_TOKEN"
TOKEN_FILE = "EVENSTEP_TOKEN_FILE"
_TASKS = r"[0-9]{1,6}(\(x[0-9]{1,6}\))?"


@dataclass(frozen=True)
class LauncherVariables:
    """What the user may set, as text."""

    EVENSTEP_TOKEN: str = ""
    EVENSTEP_TOKEN_FILE: str = ""
    """The path of a file that holds the token."""
    GLOO_SOCKET_IFNAME: str = ""
    KUBEFLOW_TRAINER_SERVER_URL: str = ""
    """Where the progress of a TrainJob is reported."""
    OMP_NUM_THREADS: str = ""
    PET_NNODES: str = ""
    SLURM_STEP_ID: str = ""
    TORCH_CPP_LOG_LEVEL: str = "ERROR"


@dataclass(frozen=True)
class SlurmVariables:
    """What Slurm sets in a job."""

    SLURM_JOB_ID: Natural | None = None
    SLURM_STEP_ID: Natural | None = None
    SLURM_PROCID: Natural = 0
    SLURM_STEP_NUM_TASKS: Positive = 1
    SLURM_LOCALID: Natural = 0
    SLURM_NODEID: Natural = 0
    SLURM_STEP_TASKS_PER_NODE: Annotated[str, Meta(pattern=f"^{_TASKS}(,{_TASKS})*$")] = "1"
    SLURM_STEP_NODELIST: str = ""
    SLURM_JOB_NODELIST: str = ""
    SLURM_RESTART_COUNT: Natural = 0


@dataclass(frozen=True)
class ElasticVariables:
    """What torchrun reads beside its options, as Kubeflow Trainer sets it in every pod of a TrainJob."""

    PET_NNODES: Annotated[str, Meta(pattern=r"^[0-9]{1,6}(:[0-9]{1,6})?$")] = ""
    PET_NPROC_PER_NODE: Annotated[str, Meta(pattern=r"^([1-9][0-9]{0,5}|auto|gpu|cpu)$")] = ""
    PET_NODE_RANK: Natural | None = None
    PET_MASTER_ADDR: str = ""
    PET_MASTER_PORT: Annotated[int, Meta(ge=1, le=65535)] = 29500
    JOB_COMPLETION_INDEX: Natural | None = None
    """What Kubernetes sets in a pod of an Indexed Job, and so of a JobSet."""


@dataclass(frozen=True)
class KubeflowVariables:
    """Where Kubeflow Trainer takes the progress of a TrainJob, and the files that it takes to get in."""

    KUBEFLOW_TRAINER_SERVER_URL: str = ""
    KUBEFLOW_TRAINER_SERVER_CA_CERT: str = ""
    KUBEFLOW_TRAINER_SERVER_TOKEN: str = ""


def launcher_variables(environment: Mapping[str, str] = os.environ) -> LauncherVariables:
    """Those of this process."""
    return read_variables(LauncherVariables, environment)


def slurm_variables(environment: Mapping[str, str] = os.environ) -> SlurmVariables:
    """Those of this process; a malformed one is refused."""
    return read_variables(SlurmVariables, environment)


def elastic_variables(environment: Mapping[str, str] = os.environ) -> ElasticVariables:
    """Those of this process; a malformed one is refused."""
    return read_variables(ElasticVariables, environment)


def kubeflow_variables(environment: Mapping[str, str] = os.environ) -> KubeflowVariables:
    """Those of this process."""
    return read_variables(KubeflowVariables, environment)


def rank_variables(ranks: tuple[int, int], of_machine: tuple[int, int], machines: tuple[int, int]) -> dict[str, str]:
    """torchrun's variables of one process: each pair is a number, and of how many."""
    (rank, size), (local_rank, local_size), (machine, num_machines) = ranks, of_machine, machines
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(machine),
        "GROUP_WORLD_SIZE": str(num_machines),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "ROLE_NAME": "default",
    }


def master_variables(port: int, *, is_store_held: bool) -> dict[str, str]:
    """Where the processes meet, on loopback; whether a launcher holds the store there, or rank 0 does."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(is_store_held),
    }


def torchrun_variables(restarts: int) -> dict[str, str]:
    """What torchrun sets beside the ranks and their address."""
    return {
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def threads_for_script(num: int) -> dict[str, str]:
    """The thread variable that torchrun sets for `num` processes of one machine, unless the user has set it."""
    return {"OMP_NUM_THREADS": "1"} if num > 1 and not launcher_variables().OMP_NUM_THREADS else {}


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set these variables in this process, and unset those that are None."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def with_variables(more: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a process to be started."""
    return {**os.environ, **more}


@contextmanager
def changed_variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Inside the block, and for processes started there, these variables are set; those that are None are unset."""
    before = {name: os.environ.get(name) for name in values}
    set_variables(values)
    try:
        yield
    finally:
        set_variables(before)


def token_hidden() -> AbstractContextManager[None]:
    """Processes started inside the block do not inherit the token: ranks and the user's code need none."""
    return changed_variables({TOKEN: None, TOKEN_FILE: None})
