"""Each rank's step and phase, in memory that the launcher reads even if that rank cannot answer.

A process that is stopped, or in which C code holds the GIL, runs no Python signal handler and sends no message. Its
last step and phase are in a memory-mapped file, one slot per rank.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

PHASES = (
    "starting up",
    "loading the task",
    "joining the process group",
    "building the model",
    "reading input",
    "in forward",
    "in backward",
    "in the optimizer's step",
    "comparing replicas",
    "evaluating",
    "saving a checkpoint",
    "ending",
)
STARTING, LOADING, JOINING, BUILDING, INPUT, FORWARD, BACKWARD, UPDATE, COMPARING, EVALUATING, SAVING, ENDING = range(
    len(PHASES)
)
PARTS = {INPUT: "input", FORWARD: "forward", BACKWARD: "backward", UPDATE: "optimizer"}
"""The phases that are parts of a step, and the parts' names."""
UNTIMED = (STARTING, LOADING, JOINING, BUILDING, SAVING, ENDING)
"""Phases whose length varies: they may download data or write a large file."""

_SLOT = struct.Struct("<qqqq")
SLOT_BYTES = 64


@dataclass(frozen=True)
class HeartbeatState:
    """The last heartbeat of one rank."""

    count: int
    """The number of heartbeats; if it does not grow, the process is stuck."""
    step: int
    phase: int
    collectives: int
    """The number of evenstep's own collectives it has entered; the rank with fewer is behind."""

    @property
    def where(self) -> str:
        """`at step 7, in forward`."""
        return f"{f'at step {self.step}, ' if self.step else ''}{PHASES[self.phase]}"

    @property
    def progress(self) -> tuple[int, int, int]:
        """Comparable between ranks: the smaller one is behind."""
        return self.step, self.phase, self.collectives


class Heartbeat:
    """This process's slot. Writing to it takes less than a microsecond."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None, slot: int = 0) -> None:
        self._memory = memory if memory is not None else bytearray(SLOT_BYTES)
        self._offset = slot * SLOT_BYTES
        # A process may open its slot twice, and no two heartbeats may be equal.
        self._count = _read(self._memory, self._offset).count
        self.step = 0
        self.collectives = 0
        self.phase = STARTING

    def beat(self, phase: int) -> None:
        """Enter a phase."""
        self._count += 1
        self.phase = phase
        _SLOT.pack_into(self._memory, self._offset, self._count, self.step, phase, self.collectives)

    def collective(self) -> None:
        """Enter one of evenstep's own collectives."""
        self.collectives += 1
        self.beat(self.phase)

    def read(self) -> HeartbeatState:
        """The last heartbeat."""
        return _read(self._memory, self._offset)


def make_heartbeats(path: Path, num_ranks: int) -> Heartbeats:
    """Create the file, with an empty slot for each rank."""
    path.write_bytes(bytes(max(1, num_ranks) * SLOT_BYTES))
    return Heartbeats(path, num_ranks)


def open_heartbeat(path: str, slot: int) -> Heartbeat:
    """This process's slot of that file."""
    with open(path, "r+b") as file:
        return Heartbeat(mmap.mmap(file.fileno(), 0), slot)


class Heartbeats:
    """The launcher's view of all slots."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._num_ranks = num_ranks

    def read(self) -> list[HeartbeatState]:
        """The last heartbeat of every rank."""
        return [_read(self._memory, rank * SLOT_BYTES) for rank in range(self._num_ranks)]

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()


def _read(memory: mmap.mmap | bytearray, offset: int) -> HeartbeatState:
    count, step, phase, collectives = _SLOT.unpack_from(memory, offset)
    return HeartbeatState(count, step, min(max(phase, 0), len(PHASES) - 1), collectives)
