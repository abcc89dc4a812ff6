"""What the terminal shows: progress while a training runs; then tables of its run, comparisons and suggestions."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

from evenstep.plan import Plan, parse_machines
from evenstep.record import EpochEnd, Evaluation, Row, Step, Summary, parts_shown
from evenstep.report.comparison import Comparison, Range
from evenstep.sampling.batch_shares import in_proportion, share
from evenstep.sampling.order import Lengths
from evenstep.strategy_facts import STRATEGIES

SECONDS_BETWEEN_LINES = 5.0
MOST_COLUMNS = 1000
"""Characters of a line; no table is wider."""
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

    def __init__(
        self, num_steps: int | None, *, quiet: bool = False, is_bare: bool = False, shows_steps: bool = True
    ) -> None:
        """`quiet` shows nothing; without `shows_steps`, only messages are shown."""
        self.console = Console(stderr=True, quiet=quiet, highlight=False, emoji=False)
        self._num_steps = num_steps
        self._shows_steps = shows_steps
        self._recent: list[Step] = []
        self._logged_at = time.monotonic()
        self._bar: Bar | None = None
        if self.console.is_terminal and shows_steps and not quiet and not is_bare:
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

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: Row | str) -> None:
        if isinstance(event, str):
            self.log(event)
        elif not self._shows_steps:
            return
        elif isinstance(event, Step):
            self._show_step(event)
        elif isinstance(event, Evaluation):
            values = "  ".join(f"{name} {value:.4f}" for name, value in event.values.items())
            train = f"train loss {event.train_loss:.4f}  " if event.train_loss is not None else ""
            self.log(f"epoch {event.epoch + 1}  step {event.step}  {train}valid: {values}")
        elif isinstance(event, EpochEnd):
            self.log(f"epoch {event.epoch + 1}  step {event.step}  train loss {event.train_loss:.4f}")

    def log(self, line: str) -> None:
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
        elif time.monotonic() - self._logged_at > SECONDS_BETWEEN_LINES:
            self._logged_at = time.monotonic()
            of = f"/{self._num_steps}" if self._num_steps is not None else ""
            self.log(f"step {step.step}{of}  loss {step.loss:.4f}  {speed:,.0f} samples/s")


def summary_table(summary: Summary, restarts: int = 0) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    trained = (
        f"{summary.steps} step{'s' * (summary.steps != 1)}, {summary.samples:,} samples in {summary.seconds:.1f} s"
    )
    table.add_row("trained", f"{trained} with evaluation and checkpoints")
    on = f"{summary.strategy}, {devices(summary.devices)}"
    table.add_row("speed", f"{summary.samples_per_second:,.0f} samples/s in steps alone ({on})")
    if restarts:
        table.add_row("restarts", str(restarts))
    if summary.train_loss is not None:
        table.add_row("train loss", number(summary.train_loss))
    for name, value in summary.valid.items():
        table.add_row(f"valid {plain(name)}", number(value))
    if summary.best is not None:
        best = summary.best
        table.add_row(
            "best", f"{plain(best.metric)} {number(best.value)} at step {best.step}, {plain(best.checkpoint)}"
        )
    if summary.stopped:
        table.add_row("stopped early", plain(summary.stopped))
    table.add_row("peak memory", peaks(summary))
    if summary.checkpoint:
        table.add_row("checkpoint", plain(summary.checkpoint))
    table.add_row("run", plain(summary.run))
    return table


def plain(text: str) -> str:
    """A name as it is: no markup, no control bytes, whoever chose it."""
    return escape(without_control(text))


def devices(names: Sequence[str]) -> str:
    """`cpu, cpu` is `2 x cpu`."""
    unique = list(dict.fromkeys(names))
    if len(unique) == 1:
        return unique[0] if len(names) == 1 else f"{len(names)} x {unique[0]}"
    return ", ".join(names)


def peaks(summary: Summary) -> str:
    """Peak memory for each device; a process on the CPU counts as a whole, with torch itself in it."""
    sizes = Counter(size(value) for value in summary.peak_bytes.values())
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in sizes.items())


def size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


PARITY = {
    "reference": ("reference", "dim"),
    "same": ("✓ same", "green"),
    "differs": ("✗ differs", "red"),
    "unknown": ("? not checked", "yellow"),
}


def show_comparison(comparison: Comparison, console: Console) -> None:
    """How fast, what a step is made of, what it holds; what did not run, and what to do."""
    for table in (speed_table(comparison), step_table(comparison), cost_table(comparison)):
        print_table(table, console)
        console.print()
    for line in _remarks(comparison):
        console.print(without_control(line), style="yellow", markup=False, soft_wrap=True)
    console.print()
    for line in comparison.advice:
        console.print(without_control(line), style="bold", markup=False, soft_wrap=True)


def speed_table(comparison: Comparison) -> Table:
    table = table_of("strategy", "samples/s", "spread", "speed-up", "efficiency")
    table.add_column("result vs. single", no_wrap=True)
    for row in comparison.rows:
        rate = row.samples_per_second
        parity, style = PARITY[row.parity]
        table.add_row(
            plain(row.label),
            f"{rate.middle:,.0f}",
            f"{rate.low:,.0f}-{rate.high:,.0f}",
            f"{comparison.speedup(row):.2f}x",
            f"{comparison.efficiency(row):.0%}",
            Text(parity, style=style),
        )
    return table


def step_table(comparison: Comparison) -> Table:
    """Where a step goes, in milliseconds."""
    short = {"communication": "comm.*", "optimizer": "opt."}
    shown = parts_shown([row.parts for row in comparison.rows])
    table = table_of("ms/step", "total", *(short.get(part, part) for part in shown), "w/o input", "w/o comm.")
    for row in comparison.rows:
        table.add_row(
            plain(row.label),
            _ms(row.step_seconds),
            *(f"{row.parts.get(part, 0.0) * 1000:.2f}" for part in shown),
            _ms(row.without_input_seconds),
            _ms(row.without_communication_seconds),
        )
    return table


def cost_table(comparison: Comparison) -> Table:
    table = table_of("cost", "start-up", "sent per step")
    table.add_column("peak memory")
    for row in comparison.rows:
        peaks = ", ".join(size(peak) for peak in row.peak_bytes.values())
        table.add_row(plain(row.label), f"{row.start_seconds.middle:.1f} s", size_in_short(row.sent_bytes), peaks)
    return table


def table_of(first: str, *more: str) -> Table:
    """A table with names in its first column and numbers in the others."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in more:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table whole: a number that is cut is another number.

    A terminal that is too narrow shows some of its columns below the others; a file or a pipe has no width.
    """
    width = console.width
    for number, part in enumerate(_parts(table, console) if console.is_terminal else [table]):
        if number:
            console.print()
        console.width = max(width, _width(part, console))
        console.print(part, soft_wrap=False)
    console.width = width


def _parts(table: Table, console: Console) -> Iterator[Table]:
    """The table's columns in groups that fit side by side, each behind the first column."""
    first, *others = table.columns
    group: list[Column] = []
    for column in others:
        if group and _width(_of_columns(table, [first, *group, column]), console) > console.width:
            yield _of_columns(table, [first, *group])
            group = []
        group.append(column)
    yield _of_columns(table, [first, *group])


def _of_columns(table: Table, columns: Sequence[Column]) -> Table:
    part = Table(box=None, pad_edge=False, header_style=table.header_style, show_header=table.show_header)
    for column in columns:
        part.add_column(column.header, justify=column.justify, style=column.style, no_wrap=True)
    for row, cells in zip(table.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
        part.add_row(*cells, style=row.style)
    return part


def _width(table: Table, console: Console) -> int:
    """Of all its characters."""
    return Measurement.get(console, console.options.update(width=MOST_COLUMNS), table).maximum


def _remarks(comparison: Comparison) -> Iterator[str]:
    yield (
        "* not overlapped with backward; w/o input, w/o comm.: the same step with its batch already loaded, "
        "and without communication"
    )
    most = max(row.accumulate for row in comparison.rows)
    if most > 1:
        yield f"all rows but the first cut a batch into {most} micro-batches a device"
    if "bubble" in parts_shown([row.parts for row in comparison.rows]):
        yield "bubble: a rank of a pipeline waits until others have computed; comm.: until what they sent has arrived"
    for row in comparison.rows:
        if not row.is_sound:
            yield f"{row.label} differs: {row.why}"
        if row.parity == "unknown":
            yield f"{row.label} was not checked: {row.why}"
        facts = STRATEGIES.get(row.strategy)
        if facts is not None and not facts.separates_communication:
            yield f"{row.label}: its communication is part of forward and backward, and cannot be timed separately"
    if any(device.startswith("cuda") for row in comparison.rows for device in row.devices):
        yield "on a GPU, train replays steps as CUDA graphs where that is safe (--fast); these are eager steps"
    for label, why in comparison.left_out.items():
        yield f"{label} could not run: {why}"


def _ms(seconds: Range | None) -> str:
    return "-" if seconds is None else f"{seconds.middle * 1000:.2f}"


def size_in_short(num_bytes: int) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.0f} KiB" if num_bytes else "-"
    return size(num_bytes)


MUCH = 1.05
"""A smaller gain, worst round against the best without the change, does not justify other arithmetic."""


def show_suggestions(found: list[Any], command: str, console: Console) -> None:
    """What each change gains and costs; and the command that uses the best of them."""
    plain, *others = found
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("change", "ms a step", "x as fast", "last loss", "first step", "pays after"):
        table.add_column(head, justify="left" if head == "change" else "right", no_wrap=True)
    for one in found:
        if one.problem:
            table.add_row(one.flag, Text("does not run", style="yellow"))
            continue
        steps = one.pays_after(plain)
        after = "" if one is plain else "never" if steps is None else f"{steps:,} steps"
        gain = plain.step_seconds / one.step_seconds
        cells = (f"{one.step_seconds * 1e3:.2f}", f"{gain:.2f}x", f"{one.loss:.4f}", f"{one.start_seconds:.1f} s")
        table.add_row(one.flag or "(none)", *cells, after)
    print_table(table, console)
    console.print()
    for one in others:
        effect = f"does not run: {one.problem}" if one.problem else one.means
        console.print(f"{one.flag}: {effect}", style="dim", markup=False, soft_wrap=True)
    worth = [one for one in others if not one.problem and min(plain.rounds) / max(one.rounds) >= MUCH]
    best = min(worth, key=lambda one: one.step_seconds, default=None)
    console.print()
    noisy = [one.flag for one in others if not one.problem and plain.step_seconds / one.step_seconds >= MUCH]
    if best is None and noisy:
        doubt = f"Nothing was changed, and nothing is recommended: {', '.join(noisy)} may be faster, but the rounds of"
        console.print(
            f"{doubt} each trial differ by as much. Try again when this machine is quiet.", style="bold", soft_wrap=True
        )
        return
    if best is None:
        console.print("Nothing was changed, and none of these is worth a change.", style="bold", soft_wrap=True)
        return
    fastest = f"Nothing was changed. The fastest of these: {command} {best.flag}"
    console.print(fastest, style="bold", markup=False, soft_wrap=True)
    console.print("It changes the arithmetic: check that the model trains as well.", style="dim", soft_wrap=True)


def batch_in_words(plan: Plan, lengths: Lengths) -> str:
    """The global batch, cut up, in one line.

    >>> plan = Plan(task="digits", batch=512, strategy="ddp", devices=("cpu",) * 4, accumulate=2, epochs=1)
    >>> batch_in_words(plan, Lengths(60_000))
    'global batch 512 = 4 devices x 64 x 2 micro-batches; 118 steps per epoch (the last has 96 samples)'
    """
    machines = parse_machines(plan.machines) if plan.machines is not None else (1, 1)
    if machines[0] != machines[1]:
        each = f"{len(plan.devices)} device{'s' * (len(plan.devices) > 1)} each"
        return (
            f"global batch {plan.batch} over {machines[0]} to {machines[1]} machines, {each}; "
            f"{_epochs_in_words(plan, lengths)}"
        )
    micro_sizes = {
        len(share(len(own), part, plan.accumulate))
        for own in in_proportion(plan.batch, plan.proportions)
        for part in range(plan.accumulate)
    }
    sizes = "-".join(str(size) for size in sorted(micro_sizes))
    parts = f" x {plan.accumulate} micro-batches" if plan.accumulate > 1 else ""
    devices = "1 device" if len(plan.devices) == 1 else f"{len(plan.devices)} devices"
    devices = f"{machines[0]} machines x {devices}" if machines[0] > 1 else devices
    if plan.num_replicas < plan.most_devices:
        num, num_each = plan.num_replicas, plan.most_devices // plan.num_replicas
        devices = f"{num} replica{'s' * (num > 1)} of {num_each} devices"
    shares = f" (shares {plan.shares})" if plan.shares is not None else ""
    if plan.virtual_replicas is not None:
        parts = f"{parts} on {devices}"
        devices = f"{plan.virtual_replicas} virtual replica{'s' * (plan.virtual_replicas > 1)}"
    return f"global batch {plan.batch} = {devices} x {sizes}{parts}{shares}; {_epochs_in_words(plan, lengths)}"


def _epochs_in_words(plan: Plan, lengths: Lengths) -> str:
    if lengths.rest is None:
        return "until the stream ends"
    steps = plan.steps_an_epoch(lengths.rest)
    growing = "".join(f"{plan.steps_an_epoch(length)}, " for length in lengths.first)
    last = lengths.rest % plan.batch
    short = f" (the last has {last} samples)" if last and steps > 1 else ""
    return f"{growing}{'then ' if growing else ''}{steps} step{'s' * (steps != 1)} per epoch{short}"
