"""What every process is doing, in memory that the launcher can read even when that process cannot answer.

A process that is stopped, or whose interpreter lock is held by C code, answers no signal handler of Python and sends
no message. It has left its last step and phase in a file that is mapped into memory, one slot for each rank.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PHASES = (
    "starting up",
    "loading the task",
    "joining the others",
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
"""Phases that are parts of a step, and what they are called there."""
UNTIMED = (STARTING, LOADING, JOINING, BUILDING, SAVING, ENDING)
"""Phases whose length says nothing about the others': data may be fetched there, or a large file written."""

_SLOT = struct.Struct("<qqqq")
SLOT_BYTES = 64


@dataclass(frozen=True)
class HeartbeatState:
    """The last sign of life of one rank."""

    count: int
    """How many there were; one that does not grow is a process that does not move."""
    step: int
    phase: int
    collectives: int
    """How many of our own (sums, gathers) it has begun: of two ranks, the one with fewer has the last one to come."""

    @property
    def where(self) -> str:
        """`at step 7, in forward`."""
        return f"{f'at step {self.step}, ' if self.step else ''}{PHASES[self.phase]}"

    @property
    def progress(self) -> tuple[int, int, int]:
        """What can be compared: of two ranks in one world, the smaller one is behind."""
        return self.step, self.phase, self.collectives


class Heartbeat:
    """This process's slot. A beat takes less than a microsecond."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None, slot: int = 0) -> None:
        self._memory = memory if memory is not None else bytearray(SLOT_BYTES)
        self._offset = slot * SLOT_BYTES
        # A process may open its slot twice, and no two beats may look alike.
        self._count = _read(self._memory, self._offset).count
        self.step = 0
        self.collectives = 0
        self.phase = STARTING
        self._write: Callable[..., None] = _SLOT.pack_into

    def also(self, listener: Callable[[int], None] | None) -> None:
        """Tell someone else of every phase too; None ends that. Without a listener this costs a beat nothing."""

        def both(memory: mmap.mmap | bytearray, offset: int, count: int, step: int, phase: int, more: int) -> None:
            _SLOT.pack_into(memory, offset, count, step, phase, more)
            assert listener is not None
            listener(phase)

        self._write = _SLOT.pack_into if listener is None else both

    def beat(self, phase: int) -> None:
        """Say what this process begins to do."""
        self._count += 1
        self.phase = phase
        self._write(self._memory, self._offset, self._count, self.step, phase, self.collectives)

    def collective(self) -> None:
        """Say that one of our own collectives begins."""
        self.collectives += 1
        self.beat(self.phase)

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Say it, and say afterwards that what was done before goes on."""
        before = self.phase
        self.beat(phase)
        yield
        self.beat(before)

    def read(self) -> HeartbeatState:
        """What was said last."""
        return _read(self._memory, self._offset)


def make_heartbeats(path: Path, num_ranks: int) -> Heartbeats:
    """The file with a slot for each rank, empty."""
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
        """The last beat of every rank."""
        return [_read(self._memory, rank * SLOT_BYTES) for rank in range(self._num_ranks)]

    def close(self) -> None:
        """Let go of the file."""
        self._memory.close()


def _read(memory: mmap.mmap | bytearray, offset: int) -> HeartbeatState:
    count, step, phase, collectives = _SLOT.unpack_from(memory, offset)
    return HeartbeatState(count, step, min(max(phase, 0), len(PHASES) - 1), collectives)
