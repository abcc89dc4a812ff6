"""A training while it runs: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import re
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from evenstep.record import Evaluation, Row, Step

SECONDS_BETWEEN_LINES = 5.0

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_ALL_BUT_RETURN = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


_FORGED = re.compile(r"^(?=[ \t]*\[ranks? \d)", re.MULTILINE)


def pass_on(text: str, stream: TextIO) -> None:
    """Write what a program printed to the stream that it meant; on a terminal, without what could take it over.

    A carriage return stays: progress bars are drawn with it.
    """
    if stream.isatty():
        # Nor can it imitate the prefix of another rank.
        text = _FORGED.sub("[rank 0] ", _ALL_BUT_RETURN.sub("", text))
    stream.write(text)
    stream.flush()


def without_control(text: str) -> str:
    """Text that cannot move the cursor, change colours or ring: what workers print is not trusted with a terminal."""
    return _CONTROL.sub("", text)


class Progress:
    """Shows steps and evaluations as they come; on stderr, so that stdout stays for results."""

    def __init__(self, num_steps: int | None, *, quiet: bool = False, is_bare: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, emoji=False)
        self._num_steps = num_steps
        self._recent: list[Step] = []
        self._spoke = time.monotonic()
        self._bar: Bar | None = None
        if self.console.is_terminal and not quiet and not is_bare:
            self._bar = Bar(
                TextColumn("[bold]epoch {task.fields[epoch]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TextColumn("[cyan]{task.fields[speed]} samples/s"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._bar_task = self._bar.add_task("train", total=num_steps, epoch=1, loss="-", speed="-")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: Row | str) -> None:
        """Take one thing that happened."""
        if isinstance(event, Step):
            self._show_step(event)
        elif isinstance(event, Evaluation):
            values = "  ".join(f"{name} {value:.4f}" for name, value in event.values.items())
            self.say(f"epoch {event.epoch + 1}  step {event.step}  valid: {values}")
        elif isinstance(event, str):
            self.say(event)

    def say(self, line: str) -> None:
        """Print a line above the bar; control bytes of whoever wrote it do not reach the terminal."""
        self.console.print(without_control(line), markup=False, soft_wrap=True)

    def _show_step(self, step: Step) -> None:
        self._recent = [*self._recent[-49:], step]
        speed = sum(one.samples for one in self._recent) / sum(one.seconds for one in self._recent)
        if self._bar is not None:
            self._bar.update(
                self._bar_task,
                completed=step.step,
                epoch=step.epoch + 1,
                loss=f"{step.loss:.4f}",
                speed=f"{speed:,.0f}",
            )
        elif time.monotonic() - self._spoke > SECONDS_BETWEEN_LINES:
            self._spoke = time.monotonic()
            of = f"/{self._num_steps}" if self._num_steps is not None else ""
            self.say(f"step {step.step}{of}  loss {step.loss:.4f}  {speed:,.0f} samples/s")
