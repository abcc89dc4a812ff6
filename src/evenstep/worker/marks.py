"""What evenstep is doing, marked in the profiler's trace: steps, their parts, and what our own code sends.

Nothing of this is in the way of a training that is not traced: the pulse is listened to, and the strategy replaced by
one that marks, for the steps that are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

from torch.profiler import record_function

from evenstep.worker.pulse import INPUT, PARTS, PHASES, Pulse
from evenstep.worker.spread import Spread
from evenstep.worker.strategies import Strategy
from evenstep.worker.team import Team

T = TypeVar("T")
MARK = "evenstep: "
TOGETHER = f"{MARK}together"


class Marks:
    """The spans that are open: one for the step, and one for each thread that has a part in it."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._step: record_function | None = None
        self._open: dict[int, tuple[str, record_function]] = {}

    @property
    def is_in_step(self) -> bool:
        return self._step is not None

    def phase(self, phase: int) -> None:
        """The pulse's listener."""
        if phase == INPUT and self._step is None:
            self.end()
            self._step = _opened(f"step {self._pulse.step}")
        name = PARTS.get(phase)
        if name is None:
            self.begin(PHASES[phase])
        elif self.is_in_step:
            self.begin(name)
        else:
            # After a pause, the pulse says again what went on before it; that step is over.
            self.end()

    def begin(self, name: str) -> None:
        """This thread does something else from here on."""
        thread = threading.get_ident()
        if thread in self._open and self._open[thread][0] == name:
            return
        self.end()
        self._open[thread] = (name, _opened(name))

    def end(self) -> None:
        """This thread does nothing that has a name."""
        _, span = self._open.pop(threading.get_ident(), ("", None))
        if span is not None:
            span.__exit__(None, None, None)

    def end_step(self) -> None:
        """The step is taken."""
        self.end()
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None


def _opened(name: str) -> record_function:
    span = record_function(f"{MARK}{name}")
    span.__enter__()
    return span


@contextmanager
def marked(team: Team, marks: Marks) -> Iterator[None]:
    """Inside, every step of this process is marked."""
    strategy, pulse = team.strategy, team.world.pulse
    sends = not strategy.processes_per_device and len(team.world.devices) > 1
    marking: Any = Marked(strategy, marks, sends)
    team.strategy = marking
    pulse.also(marks.phase)
    try:
        yield
    finally:
        pulse.also(None)
        team.strategy = strategy


class Marked:
    """A strategy, with marks where a part of the step begins that the pulse does not tell of."""

    def __init__(self, strategy: Strategy, marks: Marks, sends: bool) -> None:
        self._strategy = strategy
        self._marks = marks
        self._sends = sends
        """Whether the strategy's own code sends, and not an engine of torch's, which is in the trace by itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def refresh(self, spread: Spread, is_training: bool) -> None:
        if is_training:
            # The batch is there.
            self._marks.begin("forward")
        with self._sending("replicate"):
            self._strategy.refresh(spread, is_training)

    def on_seats(self, work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        if not self._marks.is_in_step:
            return self._strategy.on_seats(work, arguments)

        def until_done(*seat_arguments: Any) -> T:
            try:
                return work(*seat_arguments)
            finally:
                if threading.get_ident() != caller:
                    self._marks.end()

        caller = threading.get_ident()
        results = self._strategy.on_seats(until_done, arguments)
        self._marks.begin("backward")
        return results

    @contextmanager
    def syncing(self, spread: Spread, is_last: bool) -> Iterator[None]:
        with ExitStack() as inside:
            inside.enter_context(self._strategy.syncing(spread, is_last))
            yield
            with self._sending("reduce") if is_last else ExitStack():
                inside.close()

    def _sending(self, name: str) -> AbstractContextManager[Any]:
        return record_function(f"{MARK}{name}") if self._sends else ExitStack()
