"""What happened: one file of JSON lines per run, append-only, readable while it grows and after a crash."""

from __future__ import annotations

import fcntl
import json
import os
import time
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import eq
from pathlib import Path
from typing import IO, Any, Literal, TypedDict, get_args, overload

import msgspec

import evenstep
from evenstep.errors import MAX_CHARACTERS, BadInput, shorten
from evenstep.plan import Plan
from evenstep.typed_values import MALFORMED, Natural, Positive, Schema, in_words

FILE = "record.jsonl"
STUDY_FILE = "study.jsonl"
"""Of `evenstep tune`; its first row names the task."""
TRIALS = "trials"
"""The folder of a study that holds its trials, which are runs."""
FLUSH_SECONDS = 0.2
BLOCK_BYTES = 2**16
MAX_HELD = 10_000
"""Steps of a record that are held in memory: some megabytes."""
TRACES, TRACE_INDEX = "traces", "ranks.json"
"""The folder of what `--profile` traced, and the file in it that is written last, when all ranks are done."""
SPAN_PREFIX = "evenstep: "
"""Of the names of evenstep's own spans in a trace."""
PARTS = ("input", "forward", "backward", "communication", "bubble", "optimizer")
"""The parts of a step; communication counts only where it does not overlap with backward.

The bubble is the time in which a rank of a pipeline waits until others have computed.
"""


def parts_shown(every: Iterable[Mapping[str, float | None]]) -> list[str]:
    """Those of PARTS that are worth a column: a bubble only where there is one."""
    return [part for part in PARTS if part != "bubble" or any(parts.get(part) for parts in every)]


class SamplingFacts(TypedDict, total=False):
    """How samples are drawn, and where the run starts; empty in Records from before audits existed."""

    sampler: str
    repeats: bool
    num_samples: Positive | None
    first: list[Positive]
    rest: Positive | None
    dropped: list[Natural]
    """Samples that drop_last leaves out of each of the first epochs, and of every later one."""
    step: Natural
    position: Natural
    samples_file: str
    """Where an audited run writes its samples from here on."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first row of a Record, and the first one after each restart."""

    plan: dict[str, Any]
    machine: dict[str, Any]
    data: SamplingFacts = field(default_factory=lambda: SamplingFacts())


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: `loss` is the mean over the whole global batch."""

    step: Natural
    epoch: Natural
    loss: float
    samples: Natural
    count: float
    """What the loss is a mean over: samples, or tokens if the loss is a pair (sum, count) of them."""
    seconds: float
    input_seconds: float
    lr: float
    peak_bytes: dict[str, Natural]
    """Peak of every device so far; those of other ranks are updated at evaluations and at the end."""
    epoch_samples: Natural = 0
    """Samples of the whole epoch; grows under a curriculum."""
    logged: dict[str, float] = field(default_factory=dict)
    """What the loss gave to `evenstep.log`."""
    grad_norm: float | None = None
    """Of all gradients before they were clipped; None where `--clip` is not given."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The whole validation set, every sample once, after `step` steps."""

    step: Natural
    epoch: Natural
    values: dict[str, float]
    samples: Natural
    seconds: float
    train_loss: float | None = None
    """Mean over the samples of this epoch so far."""


@dataclass(frozen=True, kw_only=True)
class ValueStatistics:
    """Of the values of one tensor, wherever they lie."""

    mean: float
    std: float
    norm: float
    largest: float
    """Absolute value."""
    zeros: float
    """The part of them that is exactly 0."""


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """With `--statistics`: of every parameter, its gradient, and the output of every layer, after `step` steps."""

    step: Natural
    parameters: dict[str, ValueStatistics]
    gradients: dict[str, ValueStatistics]
    """Of the global batch, before clipping."""
    outputs: dict[str, ValueStatistics]
    """Over the global batch."""


@dataclass(frozen=True, kw_only=True)
class EpochEnd:
    """The end of an epoch that is not evaluated."""

    step: Natural
    epoch: Natural
    train_loss: float


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best evaluation of a run by one metric, and its checkpoint."""

    metric: str
    value: float
    step: Natural
    values: dict[str, float]
    checkpoint: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The end of a run, as `--json` prints it."""

    strategy: str
    devices: list[str]
    steps: Natural
    """Taken by this run, without those before it was resumed."""
    samples: Natural
    train_loss: float | None
    """Mean over the samples of the last epoch, as far as it was run."""
    valid: dict[str, float]
    samples_per_second: float
    """Without the first step, evaluation, checkpoints and start-up."""
    seconds: float
    peak_bytes: dict[str, Natural]
    checkpoint: str | None
    run: str
    shown: str | None = None
    audit: dict[str, Any] | None = None
    """What `--audit` found: the number of samples, and of repeated and missed ones."""
    best: Best | None = None
    stopped: str | None = None
    """Why the run ended before its plan did."""


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The end of a run without a summary; one that was killed has neither."""

    state: Literal["stopped", "failed"]
    why: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Spans of one device of a rank during a step (`replica 0`), of its host, or of communication (`network`)."""

    rank: Natural
    name: str
    spans: list[tuple[str, float, float]]
    """Name, begin and end; in seconds."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of every rank, in seconds since the first rank began."""

    step: Natural
    lanes: list[Lane]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One block of a comparison: steps after a warm-up, and steps without input or communication."""

    first_step_at: float
    """When the first step was done, in seconds since 1970."""
    samples: Natural
    """Of all its steps."""
    seconds: float
    """Of all its steps, including their rows in the Record."""
    step_seconds: list[float]
    """Of every step, by the wall clock."""
    timed_seconds: float
    """Of a step while its parts are timed; the parts add up to it."""
    parts: dict[str, float]
    """Seconds of a step in each of PARTS, the mean of all ranks."""
    without_input_seconds: float
    """Of a step on a batch that is already loaded."""
    without_communication_seconds: float | None
    """Of a step without communication; None where a strategy has none."""
    sent_bytes: Natural
    """By each rank in a step: gradients, and parameters under some strategies."""
    peak_bytes: dict[str, Natural]


@dataclass(frozen=True, kw_only=True)
class MeasuredShares:
    """What `--shares auto` chose after `step` steps."""

    step: Natural
    shares: list[Positive]
    """Samples of a global batch, or virtual replicas, for each device in the order of ranks."""
    seconds_per_sample: list[float]
    """Of each device, in forward."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What `--replay-every` found after `step` steps."""

    step: Natural
    replica: Natural
    """The one whose micro-batch all devices computed."""
    outcome: Literal["equal", "nondeterministic", "faulty"]
    seconds: float
    found: str = ""
    """In words, unless all bits were equal."""


Row = (
    Step | Evaluation | LayerStatistics | EpochEnd | Summary | RunEnd | Timeline | Measurement | MeasuredShares | Replay
)


@dataclass(frozen=True)
class _Kind:
    """The kind of a row."""

    kind: str


_NAME = "record of a run"
_KIND: Schema[_Kind] = Schema(_Kind, _NAME)
_ROWS: dict[str, Schema[Start | Row]] = {kind.__name__.lower(): Schema(kind, _NAME) for kind in (Start, *get_args(Row))}
_STEP: Schema[Step] = Schema(Step, _NAME)
KINDS = tuple(_ROWS)


class Steps(Sequence[Step]):
    """The steps of a record file: in memory up to MAX_HELD, so that they outlive the file; else read on access."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = array("Q")
        self._offsets = array("Q")
        """Where in the file each row begins."""
        self._held: list[Step] | None = []
        """All of them; None where they are more than MAX_HELD."""

    def add(self, step: Step, offset: int) -> None:
        """Add a row that was read at this offset."""
        self._numbers.append(step.step)
        self._offsets.append(offset)
        if len(self) > MAX_HELD:
            self._held = None
        elif self._held is not None:
            self._held.append(step)

    def forget_after(self, step: int) -> None:
        """Drop steps that were lost and are taken again."""
        num = bisect_right(self._numbers, step)
        del self._numbers[num:], self._offsets[num:]
        if self._held is not None:
            del self._held[num:]

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Step: ...

    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...

    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        if self._held is not None:
            return self._held[index]
        if isinstance(index, slice):
            return list(self._read(self._offsets[index]))
        (step,) = self._read([self._offsets[index]])
        return step

    def __iter__(self) -> Iterator[Step]:
        return iter(self._held) if self._held is not None else self._read(self._offsets)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def _read(self, offsets: Iterable[int]) -> Iterator[Step]:
        try:
            with self._path.open("rb") as file:
                for offset in offsets:
                    file.seek(offset)
                    yield _STEP.parse(file.readline(), self._path)
        except OSError as error:
            raise _KIND.refusal(self._path, error.strerror or str(error)) from error


@dataclass
class Record:
    """A run, read back from its file."""

    plan: Plan
    machine: dict[str, Any] = field(default_factory=dict)
    data: SamplingFacts = field(default_factory=lambda: SamplingFacts())
    restarts: list[SamplingFacts] = field(default_factory=list)
    """The same as `data`, for each restart after a crash or a preemption."""
    steps: Sequence[Step] = ()
    """Those of a long run are read from its file on access."""
    evaluations: list[Evaluation] = field(default_factory=list)
    statistics: list[LayerStatistics] = field(default_factory=list)
    """Of the steps that `--statistics` looked into."""
    epochs: list[EpochEnd] = field(default_factory=list)
    """The ends of those that were not evaluated."""
    timelines: list[Timeline] = field(default_factory=list)
    measurement: Measurement | None = None
    shares: MeasuredShares | None = None
    """Where `--shares auto` has measured them."""
    replays: list[Replay] = field(default_factory=list)
    """The checks of `--replay-every`."""
    summary: Summary | None = None
    end: RunEnd | None = None
    """Why there is no summary, where the run was stopped or has failed."""
    path: Path | None = None

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    def model(self, checkpoint: str = "latest", task: Any = None) -> Any:
        """The trained model, on the CPU, in evaluation mode; `checkpoint` may be "best" or "step-00000120".

        `task` is needed if the run's own cannot be found by a name, or lies outside the working folder.
        """
        if self.path is None:
            raise BadInput("this Record was not read from a run folder; write Record.read(folder).model()")
        where = self.path.parent / "checkpoints" / checkpoint
        best = self.summary.best if self.summary is not None else None
        if checkpoint == "best" and best is not None and not where.exists() and os.path.exists(best.checkpoint):
            # That of the run from which this one was resumed.
            where = Path(best.checkpoint)
        return evenstep.load_model(where, task, "name it yourself: record.model(task=...)")

    @classmethod
    def read(cls, run: str | Path, kinds: Collection[str] = KINDS) -> Record:
        """The Record of a run folder (or of a record file); of a long run, perhaps with rows of some `kinds` alone."""
        path = Path(run) / FILE if os.path.isdir(run) else Path(run)
        if not os.path.isfile(path):
            why = f"is not a run folder (it has no {FILE})" if os.path.exists(run) else "does not exist"
            raise BadInput(f"{shorten(str(run))} {why}; {_nearest_run(Path(run))}")
        reader = RecordReader(path)
        try:
            with path.open("rb") as file:
                for _ in reader.read_on(file, kinds):
                    pass
        except OSError as error:
            raise _KIND.refusal(path, error.strerror or str(error)) from error
        if reader.record is None:
            raise BadInput(f"{shorten(str(path))} is empty: the run ended before its first line")
        return reader.record


@dataclass
class Tally:
    """Sums over the steps of a run so far, for its summary; saved in checkpoints, so that a restart reads no steps."""

    steps: Natural = 0
    samples: Natural = 0
    seconds: float = 0.0
    first_samples: Natural = 0
    first_seconds: float = 0.0
    """Seconds of the first step, which includes set-up; speed is measured without it."""
    epoch: Natural = 0
    epoch_loss: float = 0.0
    """The sum of the losses of the last epoch, each times its count."""
    epoch_count: float = 0.0

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Tally:
        tally = cls()
        for step in steps:
            tally.add(step)
        return tally

    def add(self, step: Step) -> None:
        if not self.steps:
            self.first_samples, self.first_seconds = step.samples, step.seconds
        if not self.steps or step.epoch != self.epoch:
            self.epoch, self.epoch_loss, self.epoch_count = step.epoch, 0.0, 0.0
        self.steps += 1
        self.samples += step.samples
        self.seconds += step.seconds
        self.epoch_loss += step.loss * step.count
        self.epoch_count += step.count

    @property
    def train_loss(self) -> float | None:
        """The mean over the samples of the last epoch, as far as it was run."""
        return self.epoch_loss / (self.epoch_count or 1.0) if self.steps else None

    @property
    def samples_per_second(self) -> float:
        """Of all steps but the first; of that one, if there is no other."""
        if self.steps > 1:
            return (self.samples - self.first_samples) / ((self.seconds - self.first_seconds) or 1.0)
        return self.samples / (self.seconds or 1.0) if self.steps else 0.0


class RecordReader:
    """Reads a Record from a file that may still grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: Record | None = None
        """What was read so far; None before the first row."""
        # The working folder may have changed when steps are read.
        self._steps = Steps(path.absolute())

    def read_on(self, file: IO[bytes], kinds: Collection[str] = KINDS) -> Iterator[Start | Row]:
        """Add the complete lines up to the end of the file to the Record; yields each row after it was added."""
        for offset, row in _rows_with_offsets(file, kinds):
            if self.record is None:
                self.record = self._begin(row)
            else:
                self._take(self.record, row, offset)
            yield row

    def _begin(self, row: Start | Row) -> Record:
        if not isinstance(row, Start):
            raise _KIND.refusal(
                self.path, f"it begins with a {type(row).__name__.lower()}, not with the start of a run"
            )
        return Record(Plan.from_json(row.plan), machine=row.machine, data=row.data, steps=self._steps, path=self.path)

    def _take(self, record: Record, row: Start | Row, offset: int) -> None:
        match row:
            case Start():
                self._restart(record, row.data)
            case Step():
                self._steps.add(row, offset)
            case Evaluation():
                record.evaluations.append(row)
            case LayerStatistics():
                record.statistics.append(row)
            case EpochEnd():
                record.epochs.append(row)
            case Timeline():
                record.timelines.append(row)
            case Measurement():
                record.measurement = row
            case Replay():
                record.replays.append(row)
            case MeasuredShares():
                record.shares = row
            case Summary():
                record.summary = row
            case RunEnd():
                record.end = row

    def _restart(self, record: Record, data: SamplingFacts) -> None:
        """Drop the steps after the checkpoint from which the run resumes; they are taken again."""
        last = data.get("step", 0)
        self._steps.forget_after(last)
        record.restarts.append(data)
        # From the start again, the evaluation before the first step is repeated too.
        record.evaluations = [one for one in record.evaluations if one.step <= last] if last else []
        record.epochs = [one for one in record.epochs if one.step <= last]
        record.statistics = [one for one in record.statistics if one.step <= last]
        record.replays = [one for one in record.replays if one.step <= last or one.outcome == "faulty"]
        record.summary = record.end = None


def rows(file: IO[bytes], kinds: Collection[str] = KINDS) -> Iterator[Start | Row]:
    """The rows from here to the end of the file; an incomplete last line is left for the next call.

    Only rows of `kinds`, and starts; kinds of a newer evenstep are skipped.
    """
    return (row for _, row in _rows_with_offsets(file, kinds))


def _rows_with_offsets(file: IO[bytes], kinds: Collection[str]) -> Iterator[tuple[int, Start | Row]]:
    """Each row, with its offset in the file."""
    # The prefix that our writer uses, so that skipped rows are not parsed.
    skipped = tuple(f'{{"kind": "{kind}", '.encode() for kind in {*KINDS} - {*kinds, "start"})
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(start)
            return
        if line.startswith(skipped):
            continue
        try:
            kind = _KIND.decode(line).kind
            row = _ROWS[kind].decode(line) if kind in _ROWS and (kind in kinds or kind == "start") else None
        except MALFORMED as error:
            raise _KIND.refusal(file.name, f"line {_line_number(file, start)}, {in_words(error)}") from error
        if row is not None:
            yield start, row


def _line_number(file: IO[bytes], start: int) -> int:
    """Counted block by block: a long run's file may be larger than the memory."""
    file.seek(0)
    blocks = (min(BLOCK_BYTES, start - begin) for begin in range(0, start, BLOCK_BYTES))
    return sum(file.read(num_bytes).count(b"\n") for num_bytes in blocks) + 1


def _inner(what: object) -> dict[str, Any]:
    """A nested row: the lanes of a timeline, the best of a summary, statistics of a layer."""
    if not isinstance(what, Lane | Best | ValueStatistics):
        raise TypeError(f"a row holds a {type(what).__name__}, which JSON does not")
    return vars(what)


_complete = json.JSONEncoder(default=_inner).encode
_quick = msgspec.json.Encoder(enc_hook=_inner).encode


def _encode(row: dict[str, Any]) -> str:
    """A row as `json.dumps` writes it, in a fifth of the time."""
    try:
        text = msgspec.json.format(_quick(row), indent=0).decode()
    except (TypeError, UnicodeEncodeError):  # a subclass of str or float; half a surrogate pair
        return _complete(row)
    # NaN and infinity become null, and Records keep them.
    return _complete(row) if "null" in text else text


class RecordWriter:
    """Appends rows; they reach the file within a fifth of a second, and at once when the training ends or fails."""

    def __init__(
        self, run_folder: Path, plan: Plan, machine: dict[str, Any], data: Mapping[str, Any] | None = None
    ) -> None:
        self._path = run_folder / FILE
        _cut_torn_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        with suppress(OSError):
            # Held until this process ends, however it ends: `is_written` asks for it.
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._flushed = 0.0
        self._write({"kind": "start", "plan": plan.to_json(), "machine": machine, "data": dict(data or {})})

    def append(self, what: Row) -> None:
        # Not asdict, whose deep copy took as long as a layer of a small network.
        row = {"kind": type(what).__name__.lower(), **vars(what)}
        # What most runs have nothing of.
        absent = [name for name in ("logged", "grad_norm") if name in row and row[name] in (None, {})]
        for name in absent:
            del row[name]
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(_encode(row) + "\n")
        now = time.monotonic()
        if now - self._flushed > FLUSH_SECONDS:
            self._flushed = now
            self._file.flush()

    def flush(self) -> None:
        """Write buffered rows, before a checkpoint that later runs resume from."""
        self._file.flush()
        if not self._path.exists():
            raise FileNotFoundError(f"{self._path} is gone: the folder of this run was deleted or moved")

    def close(self) -> None:
        """Write what is left, if possible; what must be written was flushed before, with an error if that failed."""
        with suppress(OSError):
            self._file.close()


def write_end(run_folder: Path, end: RunEnd) -> None:
    """Append the end of a run that has begun, after its processes have ended."""
    with suppress(OSError):
        if has_begun(run_folder):
            _cut_torn_line(run_folder / FILE)
            with (run_folder / FILE).open("a", encoding="utf-8") as file:
                file.write(_encode({"kind": "runend", **vars(end)}) + "\n")


def is_written(path: Path) -> bool:
    """Whether a process is writing this record file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
    return False


def ends_of(path: Path) -> tuple[Start, list[Start | Row]]:
    """The first row of a record file, and its last ones: a long run's file is not read for its end."""
    kinds = ("step", "evaluation", "summary", "runend")
    with path.open("rb") as file:
        start = next(rows(file, ()), None)
        if not isinstance(start, Start):
            raise BadInput(f"{shorten(str(path))} is empty: the run ended before its first line")
        begin = file.seek(0, os.SEEK_END) - BLOCK_BYTES
        file.seek(max(0, begin))
        if begin > 0:
            file.readline()
        return start, list(rows(file, kinds))


def study_of(run_folder: Path) -> Path | None:
    """The folder of the study that a run is a trial of."""
    above = run_folder.resolve().parent
    is_trial = above.name == TRIALS and os.path.isfile(above.parent / STUDY_FILE)
    return above.parent if is_trial else None


def has_begun(run_folder: Path) -> bool:
    """Whether a run in this folder has written any rows."""
    file = run_folder / FILE
    return file.exists() and file.stat().st_size > 0


def _cut_torn_line(path: Path) -> None:
    """Cut off the incomplete last line of a killed process: the next row would be appended to it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        file.truncate(end_of_rows(file))


def end_of_rows(file: IO[bytes]) -> int:
    """The end of the last whole line, searched from the end: a long run resumes as fast as a short one."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def _nearest_run(run: Path) -> str:
    """A run of a similar name in the same folder; else, how to find one."""
    import difflib  # not needed by a run that is there

    try:
        names = [name for name in os.listdir(run.parent) if os.path.isfile(run.parent / name / FILE)]
    except OSError:
        names = []
    close = difflib.get_close_matches(run.name[:MAX_CHARACTERS], names, n=1)
    if close:
        return f"did you mean {run.parent / close[0]}?"
    return "give a run folder, such as runs/2026-11-15-digits-ddp; evenstep runs lists them"
