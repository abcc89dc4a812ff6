"""What goes on inside the steps of this process, for whoever wants to know: its phases, and what travels meanwhile.

A tap is closed most of the time, and then costs nothing. Open, it notes the time at every change of phase; on a card
that is the device's time, not the host's. Muted, it has the strategies send nothing: what a step takes then is the
limit for every way of sending it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from evenstep.worker.pulse import PARTS, Pulse

HOST = "host"
NETWORK = "network"

Moment = float | torch.cuda.Event


@dataclass(frozen=True)
class Mark:
    """From this moment on, a lane does what the name says."""

    lane: str
    name: str
    moment: Moment


@dataclass(frozen=True)
class Travel:
    """Something that was on its way from one moment to another."""

    name: str
    begin: Moment
    end: Moment


class Tap:
    """Of one process; every World has one."""

    def __init__(self) -> None:
        self.is_open = False
        self.is_muted = False
        self.marks: list[Mark] = []
        self.travels: list[Travel] = []
        self.sent_bytes = 0
        self._on_card = False
        self._begins: dict[torch.device, tuple[float, torch.cuda.Event]] = {}
        self._doing = ""

    def open(self, pulse: Pulse, devices: Sequence[torch.device]) -> None:
        """Begin to note what happens; each card has a clock of its own, which is set by the host's here."""
        self._on_card = devices[0].type == "cuda"
        for device in devices if self._on_card else ():
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self._begins[device] = (time.perf_counter(), event)
        self.is_open = True
        pulse.also(self._phase)

    def close(self, pulse: Pulse) -> None:
        """Note no more."""
        self.is_open = False
        pulse.also(None)

    def now(self) -> Moment:
        """This moment of the device's work."""
        if not self._on_card:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Moment) -> float:
        """On the clock that all processes of this machine share; the device must have come past that moment."""
        if isinstance(moment, float):
            return moment
        begun, event = self._begins[moment.device]
        return begun + float(event.elapsed_time(moment)) / 1000

    def mark(self, name: str) -> None:
        """The thread that calls this begins to do something else."""
        if self.is_open:
            self._doing = name
            self.marks.append(Mark(_lane(), name, self.now()))

    def rest(self) -> None:
        """A device that is driven by a thread of its own has done its part of a step."""
        if self.is_open and _lane() != HOST:
            self.marks.append(Mark(_lane(), "", self.now()))

    @contextmanager
    def sending(self, name: str, num_bytes: int, then: str = "") -> Iterator[None]:
        """Around a collective that this process waits for; on a card it is only begun, and waited for by the card.

        What was done before goes on afterwards, unless it is said what comes then.
        """
        if not self.is_open:
            yield
            return
        begin, before = self.now(), then or self._doing
        self.sent_bytes += num_bytes
        if not self._on_card:
            self.mark("communication")
        yield
        self.travelled(name, begin)
        if not self._on_card:
            self.mark(before)

    def sent(self, tensors: Sequence[torch.Tensor], times: int = 1) -> None:
        """These were sent, each so many times."""
        if self.is_open:
            self.sent_bytes += times * size_of(tensors)

    def travelled(self, name: str, begin: Moment) -> None:
        """Something that was sent at `begin` has arrived now."""
        self.travels.append(Travel(name, begin, self.now()))

    def _phase(self, phase: int) -> None:
        if phase in PARTS:
            self.mark(PARTS[phase])


def _lane() -> str:
    """`seat 1` in the thread that drives it; whatever else runs (the engine's threads, too) is the host's."""
    thread = threading.current_thread().name
    return thread.partition("_")[0].replace("-", " ") if thread.startswith("seat-") else HOST


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
