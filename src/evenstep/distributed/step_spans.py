"""What this process is doing, announced once for everyone who listens: the heartbeat, the timer and the profiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from evenstep.distributed.heartbeat import PARTS, PHASES, Heartbeat

if TYPE_CHECKING:
    import torch

HOST = "host"
_NAMES = [PARTS.get(phase, name) for phase, name in enumerate(PHASES)]
_thread = threading.local()


def drive_replica(replica: int) -> None:
    """From now on, the calling thread does nothing but drive this replica."""
    _thread.lane = f"replica {replica}"


def lane() -> str:
    """`replica 1` in the thread that drives it; any other thread, such as autograd's, belongs to the host."""
    return getattr(_thread, "lane", HOST)


def _nothing() -> None:
    pass


class Listener:
    """Its methods are called in the thread that announces; a subclass replaces those that it needs."""

    def part(self, name: str) -> None:
        """This thread begins a part of a step or another phase, which ends the previous one."""

    def leave(self) -> None:
        """This thread has finished its share of a step."""

    def send(self, name: str, tensors: Sequence[torch.Tensor], waits: bool) -> Callable[[], None]:
        """Tensors are sent; the result is called when they have arrived."""
        return _nothing


class Spans:
    """Announces phases and parts of steps. Without listeners this costs no more than the heartbeat."""

    def __init__(self, heartbeat: Heartbeat | None = None) -> None:
        self.heartbeat = heartbeat or Heartbeat()
        self.listeners: tuple[Listener, ...] = ()

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Inside, the listener hears of every part."""
        self.listeners += (listener,)
        try:
            yield
        finally:
            self.listeners = tuple(one for one in self.listeners if one is not listener)

    def begin(self, phase: int) -> None:
        """Enter a phase of `evenstep.distributed.heartbeat`."""
        self.heartbeat.beat(phase)
        if self.listeners:
            self.part(_NAMES[phase])

    def part(self, name: str) -> None:
        """Begin a part of the phase, such as the communication after backward; the heartbeat does not know these."""
        for listener in self.listeners:
            listener.part(name)

    def leave(self) -> None:
        """This thread, one of several that drive replicas, has finished its share of a step."""
        for listener in self.listeners:
            listener.leave()

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Enter a phase, and return to the previous one afterwards."""
        before = self.heartbeat.phase
        self.begin(phase)
        yield
        self.begin(before)

    def send(self, name: str, tensors: Sequence[torch.Tensor], waits: bool = False) -> Callable[[], None]:
        """Send these; to be called when they have arrived, if that can be observed.

        `waits`: on a CPU this thread communicates in between, and then continues what it did before.
        """
        if not self.listeners:
            return _nothing
        ends = [listener.send(name, tensors, waits) for listener in self.listeners]

        def arrived() -> None:
            for end in ends:
                end()

        return arrived
