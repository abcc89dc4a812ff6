"""How the processes of one attempt find each other. A way to start on other machines is one class of this shape."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from evenstep.distributed.temporary import live_folder
from evenstep.distributed.world import STORE
from evenstep.launcher.failure import Cause


@dataclass(frozen=True)
class RankAssignment:
    """Where the processes that this launcher starts stand among all of them."""

    first_rank: int
    size: int
    machine: int = 0
    num_machines: int = 1
    local_offset: int = 0
    """How many processes of other launchers on the same machine come before these."""
    num_local: int = 0
    """Processes on this machine, those of other launchers included."""
    resume: str | None = None
    """The checkpoint from which all of them go on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What workers need to know in order to meet."""

    def describe(self) -> str:
        return f"{self.num_machines} machines, {self.size} processes; this is machine {self.machine + 1}"

    def environments(self, num: int, more: Mapping[str, str]) -> list[dict[str, str]]:
        """What each local process is told, in the words of torchrun."""
        return [
            {
                "RANK": str(self.first_rank + local),
                "LOCAL_RANK": str(self.local_offset + local),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.num_local or num),
                "GROUP_RANK": str(self.machine),
                "GROUP_WORLD_SIZE": str(self.num_machines),
                "ROLE_RANK": str(self.first_rank + local),
                "ROLE_WORLD_SIZE": str(self.size),
                "ROLE_NAME": "default",
                **self.environment,
                **more,
            }
            for local in range(num)
        ]


class Rendezvous(Protocol):
    """The launchers of one run, which may be on many machines."""

    def waiting_message(self) -> str:
        """What is waited for now, in one line; nothing, if that will not take long."""

    def next_round(self, num: int, attempt: int, resume: str | None = None) -> RankAssignment | None:
        """Wait until enough machines are there; each brings `num` processes, the first one knows where to go on.

        None if the run ended without the processes of this launcher.
        """

    def report_failure(self, cause: Cause) -> Cause:
        """Say that an attempt has failed here, so that nobody waits for it; what all machines believe was the cause."""

    def remote_failure(self) -> Cause | None:
        """What failed elsewhere, in this attempt."""

    def has_waiting_machine(self, asks_store: bool = False) -> bool:
        """Whether a machine has come that could take part; `is_certain` takes its time to find out."""

    def close(self) -> None:
        """Leave."""


class LocalRendezvous:
    """Processes of one machine meet through a file in a folder of their own; nothing listens to the outside."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(live_folder())

    def next_round(self, num: int, attempt: int, resume: str | None = None) -> RankAssignment:
        # Of its own for each attempt: what a killed process left in it would be taken for a new one's.
        return RankAssignment(0, num, resume=resume, environment={STORE: str(self._folder / f"store-{attempt}")})

    def waiting_message(self) -> str:
        return ""

    def report_failure(self, cause: Cause) -> Cause:
        """There is nobody else."""
        return cause

    def remote_failure(self) -> Cause | None:
        return None

    def has_waiting_machine(self, asks_store: bool = False) -> bool:
        return False

    def close(self) -> None:
        self._stack.close()


def torchrun_environment(address: str, port: int, size: int, restarts: int) -> dict[str, str]:
    """What torchrun sets beside the ranks."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # The launcher holds the store, so that no other program can take its port. A process alone may be a script
        # that starts others by itself: its first one must hold it.
        "TORCHELASTIC_USE_AGENT_STORE": str(size > 1),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
