"""How launchers on one or many machines find and authenticate each other; here the protocol, and one machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from evenstep.distributed.temporary_folders import live_folder
from evenstep.distributed.worker_process import WorkerSpec
from evenstep.launcher.failure import Cause
from evenstep.launcher.variables import rank_variables

Spec = TypeVar("Spec", bound=WorkerSpec)


@dataclass(frozen=True)
class RankAssignment:
    """The ranks of the processes that this launcher starts, and their environment."""

    first_rank: int
    size: int
    machine: int = 0
    num_machines: int = 1
    local_offset: int = 0
    """Processes of other launchers on this machine that come before these."""
    num_local: int = 0
    """Processes on this machine, those of other launchers included."""
    resume: str | None = None
    """The checkpoint from which all of them continue."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables with which the workers find the store."""
    store: str | None = None
    """The file of the store, if there is one machine."""

    def describe(self) -> str:
        return f"{self.num_machines} machines, {self.size} processes; this is machine {self.machine + 1}"

    def specs(self, spec: Spec, num: int) -> list[Spec]:
        """The spec of each local process, with its rank."""
        return [
            replace(
                spec,
                slot=local,
                store=self.store,
                resume=self.resume,
                environment={**spec.environment, **self._variables(local, num), **self.environment},
            )
            for local in range(num)
        ]

    def _variables(self, local: int, num: int) -> dict[str, str]:
        ranks = self.first_rank + local, self.size
        of_machine = self.local_offset + local, self.num_local or num
        return rank_variables(ranks, of_machine, (self.machine, self.num_machines))


class Rendezvous(Protocol):
    """Connects the launchers of one run, which may be on many machines."""

    is_head: bool
    """Whether this launcher shows the training and has its Record."""

    def waiting_message(self) -> str:
        """What the next round waits for, in one line; empty if it will not take long."""

    def next_round(self, num: int, attempt: int, resume: str | None = None) -> RankAssignment | None:
        """Wait for enough machines, and assign ranks; `num` processes start here, and the first machine sets `resume`.

        None if the run ended without this launcher.
        """

    def report_failure(self, cause: Cause) -> Cause:
        """Publish that this attempt failed here; return the cause that all machines agree on."""

    def remote_failure(self) -> Cause | None:
        """What failed on another machine in this attempt."""

    def has_waiting_machine(self, asks_store: bool = False) -> bool:
        """Whether another machine waits to join; `asks_store` does not rely on the latest heartbeat."""

    def close(self) -> None:
        """Leave."""


class LocalRendezvous:
    """Processes of one machine meet through a file store in a private folder; no port is opened."""

    is_head = True

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(live_folder())

    def next_round(self, num: int, attempt: int, resume: str | None = None) -> RankAssignment:
        # A new file for each attempt: a killed process's keys would be mistaken for a new one's.
        return RankAssignment(0, num, resume=resume, store=str(self._folder / f"store-{attempt}"))

    def waiting_message(self) -> str:
        return ""

    def report_failure(self, cause: Cause) -> Cause:
        """The cause itself: there is no other machine."""
        return cause

    def remote_failure(self) -> Cause | None:
        return None

    def has_waiting_machine(self, asks_store: bool = False) -> bool:
        return False

    def close(self) -> None:
        self._stack.close()
