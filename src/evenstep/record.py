"""What happened: one file of JSON lines per run, append-only, readable while it grows and after a crash."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from evenstep.errors import BadInput
from evenstep.plan import Plan

FILE = "record.jsonl"
FLUSH_SECONDS = 0.2
KINDS = ("step", "evaluation", "summary", "timeline", "measurement")
PARTS = ("input", "forward", "backward", "communication", "optimizer")
"""What a step is made of; communication is what of it was not hidden behind backward."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: `loss` is the mean over the whole global batch."""

    step: int
    epoch: int
    loss: float
    samples: int
    count: float
    """What the loss is a mean over: the samples, or the tokens, say, if the loss is a pair (sum, count)."""
    seconds: float
    input_seconds: float
    lr: float
    peak_bytes: dict[str, int]
    """Peak of every device so far; gathered from the other ranks at evaluations and at the end, own ones live."""
    epoch_samples: int = 0
    """Samples of the whole epoch; grows under a curriculum."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The whole validation set, every sample once, after `step` steps."""

    step: int
    epoch: int
    values: dict[str, float]
    samples: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The end of a run in the words that `--json` prints."""

    strategy: str
    devices: list[str]
    steps: int
    """Taken by this run; a resumed one does not count what came before."""
    samples: int
    train_loss: float | None
    """Mean over the samples of the last epoch, or of what was run of it."""
    valid: dict[str, float]
    samples_per_second: float
    """Of the steps alone, the first one left out; evaluation, checkpoints and start-up are not in it."""
    seconds: float
    peak_bytes: dict[str, int]
    checkpoint: str | None
    run: str
    shown: str | None = None
    audit: dict[str, Any] | None = None
    """What `--audit` found: samples, how many of them were repeated, how many were missed."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What one device of a rank did during a step (`seat 0`), what its host did, or what travelled (`network`)."""

    rank: int
    name: str
    spans: list[tuple[str, float, float]]
    """Name, begin and end; in seconds."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step as every rank spent it; seconds count from when the first of them began."""

    step: int
    lanes: list[Lane]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One block of a comparison: steps after a warm-up, and the same steps without this or that."""

    first_step_at: float
    """When the first step was done, in seconds since 1970."""
    samples: int
    """Of all its steps."""
    seconds: float
    """Of all its steps, and of what becomes of them: a row of the Record."""
    step_seconds: list[float]
    """Of every step alone, by the wall clock."""
    timed_seconds: float
    """Of a step while its parts are timed; the parts add up to it."""
    parts: dict[str, float]
    """Seconds of a step in each of PARTS, the mean of all ranks."""
    without_input_seconds: float
    """Of a step on a batch that is there already."""
    without_communication_seconds: float | None
    """Of a step after which nothing is sent; None where nothing ever is."""
    sent_bytes: int
    """By each rank in a step: gradients, and parameters where those travel."""
    peak_bytes: dict[str, int]


Row = Step | Evaluation | Summary | Timeline | Measurement


@dataclass
class Record:
    """A run, read back from its file."""

    plan: Plan
    machine: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    """How samples are drawn and from where this run goes on; empty in records of before there was an audit."""
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """The same as `data`, for each time that the run went on after a crash or a preemption."""
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    measurement: Measurement | None = None
    summary: Summary | None = None
    path: Path | None = None

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [step.loss for step in self.steps]

    @classmethod
    def read(cls, run: str | Path, kinds: Collection[str] = KINDS) -> Record:
        """The Record of a run folder (or of a record file); of a long run, perhaps with rows of some `kinds` alone."""
        path = Path(run) / FILE if Path(run).is_dir() else Path(run)
        if not path.is_file():
            raise BadInput(f"{run} is no run folder: it has no {FILE}")
        record: Record | None = None
        try:
            with path.open("rb") as file:
                for row in rows(file):
                    if record is None:
                        record = cls.begin(row, path)
                    elif row["kind"] in kinds or row["kind"] == "start":
                        record.take(row)
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path} is no record of a run ({type(error).__name__}: {error})") from error
        if record is None:
            raise BadInput(f"{path} is empty: the run ended before its first line")
        return record

    @classmethod
    def begin(cls, row: Mapping[str, Any], path: Path | None = None) -> Record:
        """A Record that has its first row alone."""
        return cls(Plan.from_json(row["plan"]), machine=row["machine"], data=row.get("data", {}), path=path)

    def take(self, row: Mapping[str, Any]) -> Row | None:
        """Add one row of the file; the value it became."""
        values = {name: value for name, value in row.items() if name != "kind"}
        if row["kind"] == "start":
            self._restart(dict(row.get("data", {})))
            return None
        if row["kind"] == "step":
            self.steps.append(Step(**values))
            return self.steps[-1]
        if row["kind"] == "evaluation":
            self.evaluations.append(Evaluation(**values))
            return self.evaluations[-1]
        if row["kind"] == "timeline":
            lanes = [_lane(lane) for lane in values["lanes"]]
            self.timelines.append(Timeline(step=values["step"], lanes=lanes))
            return self.timelines[-1]
        if row["kind"] == "measurement":
            self.measurement = Measurement(**values)
            return self.measurement
        if row["kind"] == "summary":
            self.summary = Summary(**values)
            return self.summary
        return None

    def _restart(self, data: dict[str, Any]) -> None:
        """What came after the checkpoint from which the run goes on was lost, and is done again."""
        self.restarts.append(data)
        last = data.get("step", 0)
        self.steps = [step for step in self.steps if step.step <= last]
        self.evaluations = [one for one in self.evaluations if one.step <= last]
        self.summary = None


def _lane(values: Mapping[str, Any]) -> Lane:
    spans = [(str(name), float(begin), float(end)) for name, begin, end in values["spans"]]
    return Lane(rank=values["rank"], name=values["name"], spans=spans)


def rows(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The whole lines from here to the end; a line that is still being written is left for next time."""
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(start)
            return
        yield json.loads(line)


def _inner(what: object) -> dict[str, Any]:
    """A row inside of another one: the lanes of a timeline."""
    if not isinstance(what, Lane):
        raise TypeError(f"a row holds a {type(what).__name__}, which JSON does not")
    return vars(what)


_encode = json.JSONEncoder(default=_inner).encode


class RecordWriter:
    """Appends rows; they reach the file within a fifth of a second, and at once when the training ends or fails."""

    def __init__(
        self, run_folder: Path, plan: Plan, machine: dict[str, Any], data: Mapping[str, Any] | None = None
    ) -> None:
        self._path = run_folder / FILE
        _cut_torn_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._flushed = 0.0
        self._write({"kind": "start", "plan": plan.to_json(), "machine": machine, "data": dict(data or {})})

    def append(self, what: Row) -> None:
        """Add one row."""
        # Not asdict, which copies all of it, value by value: that took as long as a layer of a small network.
        self._write({"kind": type(what).__name__.lower(), **vars(what)})

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(_encode(row) + "\n")
        now = time.monotonic()
        if now - self._flushed > FLUSH_SECONDS:
            self._flushed = now
            self._file.flush()

    def flush(self) -> None:
        """Write what is left, before something is done that later runs go on from."""
        self._file.flush()
        if not self._path.exists():
            raise FileNotFoundError(f"{self._path} is gone: the folder of this run was deleted or moved")

    def close(self) -> None:
        """Write what can be; what must be was flushed, and whoever could not do that has said so."""
        with suppress(OSError):
            self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Take off what a process that was killed had begun to write: the next row would be written into it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
