"""The other processes that share memory: waiting for them, and noticing that one has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from evenstep.errors import RankLost, TrainingError
from evenstep.worker.machine import num_cores

SPINS = 300
"""Looks before the core is offered to others; about 50 microseconds."""
YIELD_SECONDS = 0.0002
SLEEP_PART = 1 / 16
"""Of the time waited so far: what is slept before the next look."""
LONGEST_SLEEP = 0.005
LOOK_SECONDS = 0.05
LONGEST_WAIT = timedelta(minutes=30)
"""As long as torch's own collectives."""


@dataclass(frozen=True)
class Peers:
    """All processes of the memory, this one too."""

    pids: Sequence[int]
    started: Sequence[str]
    rank: int
    may_spin: bool

    @classmethod
    def of(cls, everyone: Sequence[Mapping[str, Any]], rank: int) -> Peers:
        """Those that introduced themselves."""
        pids = [int(one["pid"]) for one in everyone]
        # More processes than cores: who looks again and again keeps the one away that is waited for.
        return cls(pids, [one["started"] for one in everyone], rank, len(pids) <= num_cores())

    @property
    def size(self) -> int:
        return len(self.pids)

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Until it is there. Python sees signals meanwhile, and a process that has ended is noticed."""
        if self.may_spin:
            for _ in range(SPINS):
                if is_there():
                    return
        began = time.perf_counter()
        looked = began
        while not is_there():
            now = time.perf_counter()
            waited = now - began
            _rest(waited)
            if now - looked > LOOK_SECONDS:
                looked = now
                # What was posted before its end counts.
                lost = self.lost()
                if is_there():
                    return
                self.judge(lost, waited)

    def judge(self, lost: Sequence[int], waited: float) -> None:
        """Wait no longer for ranks that have ended, nor for ever."""
        if lost:
            raise RankLost(
                f"rank {lost[0]} ended while this one waited for it: if it left a report, the cause is there"
            )
        if waited > LONGEST_WAIT.total_seconds():
            raise TrainingError(
                f"waited for {waited:.0f} s for another rank, which is stuck, or took another path (a step "
                "more or less, a backward under `if rank == 0`)"
            )

    def lost(self) -> list[int]:
        """The ranks that have ended."""
        return [
            rank
            for rank, (pid, started) in enumerate(zip(self.pids, self.started, strict=True))
            if rank != self.rank and started_at(pid) != started
        ]


def started_at(pid: int) -> str:
    """When a process began, in the kernel's own words; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _rest(waited: float) -> None:
    """Leave the core to others, the longer the longer this process has waited."""
    if waited < YIELD_SECONDS:
        os.sched_yield()
    else:
        time.sleep(min(LONGEST_SLEEP, waited * SLEEP_PART))
