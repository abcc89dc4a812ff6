"""What was written is read back, also while it is written and after the writer was cut off."""

from __future__ import annotations

import io
import json
import math
import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep.errors import BadInput
from evenstep.launcher.supervisor import RecordTail
from evenstep.plan import Plan
from evenstep.record import BLOCK_BYTES, FILE, Evaluation, Record, RecordWriter, Start, Step, Summary, end_of_rows, rows

PLAN = Plan(task="digits", batch=8, epochs=2, strategy="ddp", devices=("cpu", "cpu"), name="été")
MACHINE = {"python": "3.11", "cores": 2}


def step(number: int) -> Step:
    return Step(
        step=number,
        epoch=number // 3,
        loss=1 / 3 / number,
        samples=8,
        count=8,
        seconds=0.1,
        input_seconds=0.01,
        lr=1e-3,
        peak_bytes={"rank0 cpu": 2**31},
    )


EVALUATION = Evaluation(step=2, epoch=0, values={"loss": 0.25, "accuracy": 0.9}, samples=101, seconds=0.5)
SUMMARY = Summary(
    strategy="ddp",
    devices=["cpu", "cpu"],
    steps=2,
    samples=16,
    train_loss=None,
    valid={"loss": 0.25},
    samples_per_second=80.0,
    seconds=1.5,
    peak_bytes={},
    checkpoint=None,
    run="runs/été",
    shown="a line\nand another",
)
ROWS = [step(1), step(2), EVALUATION, SUMMARY]


def written(folder: Path) -> Path:
    writer = RecordWriter(folder, PLAN, MACHINE)
    for row in ROWS:
        writer.append(row)
    writer.close()
    return folder / FILE


def check_whole(record: Record) -> None:
    assert record.plan == PLAN
    assert record.machine == MACHINE
    assert record.steps == [step(1), step(2)]
    assert record.losses == [step(1).loss, step(2).loss]
    assert record.evaluations == [EVALUATION]
    assert record.summary == SUMMARY


def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    file = written(tmp_path)
    check_whole(Record.read(tmp_path))
    check_whole(Record.read(str(file)))
    assert Record.read(tmp_path).path == file


def test_a_loss_that_is_not_finite_is_kept_too(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, PLAN, MACHINE)
    writer.append(Step(**{**vars(step(1)), "loss": float("inf")}))
    writer.close()
    assert Record.read(tmp_path).losses == [float("inf")]


def test_a_file_cut_off_anywhere_gives_its_whole_lines(tmp_path: Path) -> None:
    file = written(tmp_path)
    content = file.read_bytes()
    first = content.index(b"\n") + 1
    for cut in range(first, len(content)):
        file.write_bytes(content[:cut])
        record = Record.read(tmp_path)
        found = len(record.steps) + len(record.evaluations) + (record.summary is not None)
        assert found == content[:cut].count(b"\n") - 1


def test_a_torn_line_is_left_and_read_once_it_is_whole(tmp_path: Path) -> None:
    content = written(tmp_path).read_bytes()
    file = tmp_path / "growing.jsonl"
    middle = content.index(b"\n") + 20
    with file.open("wb") as writer, file.open("rb") as reader:
        writer.write(content[:middle])
        writer.flush()
        assert [type(row) for row in rows(reader)] == [Start]
        assert list(rows(reader)) == []
        writer.write(content[middle:])
        writer.flush()
        assert [type(row) for row in rows(reader)] == [Step, Step, Evaluation, Summary]


def test_a_run_can_be_read_from_its_first_row_on(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, PLAN, MACHINE)
    assert Record.read(tmp_path).plan == PLAN
    assert Record.read(tmp_path).steps == []
    writer.append(step(1))
    writer.close()
    assert Record.read(tmp_path).steps == [step(1)]


def test_rows_of_a_kind_from_the_future_are_passed_over(tmp_path: Path) -> None:
    file = written(tmp_path)
    with file.open("a") as more:
        more.write('{"kind": "dream", "about": "sheep"}\n')
    check_whole(Record.read(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "record.jsonl is empty: the run ended before its first line"),
        ('{"kind": "start", "pl', "record.jsonl is empty: the run ended before its first line"),
        ("# A heading\n", "record.jsonl is not a record of a run"),
        ('{"kind": "step"}\n', "record.jsonl is not a record of a run"),
        ("[1, 2]\n", "record.jsonl is not a record of a run: line 1, expected object, got array"),
        ("[" * 100_000 + "\n", "record.jsonl is not a record of a run: line 1"),
        ('{"kind": "start", "plan": [], "machine": {}}\n', "line 1, plan: expected object, got array"),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(BadInput, match=message):
        Record.read(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("step", None, "line 3, step: expected int, got null"),
        ("step", -1, "line 3, step: expected int >= 0"),
        ("samples", 10**30, "line 3, samples: expected int <= 9223372036854775807"),
        ("loss", "0.5", "line 3, loss: expected float, got str"),
        ("peak_bytes", [], "line 3, peak_bytes: expected object, got array"),
    ],
)
def test_a_row_that_is_damaged_is_named_with_its_field(tmp_path: Path, field: str, value: Any, message: str) -> None:
    file = written(tmp_path)
    lines = file.read_text().splitlines(keepends=True)
    lines[2] = json.dumps({"kind": "step", **vars(step(2)), field: value}) + "\n"
    file.write_text("".join(lines))
    with pytest.raises(BadInput, match=f"record.jsonl is not a record of a run: {message}"):
        Record.read(tmp_path)


def test_a_row_of_a_newer_version_may_have_more_fields(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_text(file.read_text().replace('"kind": "step"', '"kind": "step", "dreams": 3'))
    check_whole(Record.read(tmp_path))


def test_a_folder_without_a_record_and_a_missing_one_are_refused() -> None:
    Path("empty").mkdir()
    with pytest.raises(BadInput, match=r"empty is not a run folder \(it has no record.jsonl\)"):
        Record.read("empty")
    with pytest.raises(BadInput, match="nowhere does not exist; give a run folder"):
        Record.read("nowhere")


def test_the_rows_after_a_torn_one_are_read_when_a_run_goes_on(tmp_path: Path) -> None:
    plan = Plan(batch=2, epochs=1)
    first = RecordWriter(tmp_path, plan, {}, {"step": 0})
    first.close()
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    tail = RecordTail(tmp_path / "record.jsonl")
    assert list(tail.new()) == []
    again = RecordWriter(tmp_path, plan, {}, {"step": 0})
    row = Step(step=1, epoch=0, loss=1.0, samples=2, count=2, seconds=1, input_seconds=0, lr=1, peak_bytes={})
    again.append(row)
    again.close()
    assert list(tail.new()) == [row]
    tail.close()
    assert Record.read(tmp_path).steps == [row]
    assert len(Record.read(tmp_path).restarts) == 1


def test_steps_of_a_short_run_outlive_its_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    record = Record.read(tmp_path)
    path.unlink()
    check_whole(record)
    assert record.losses == [step.loss for step in record.steps]


def test_steps_of_a_long_run_are_read_from_the_file_when_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenstep.record.MAX_HELD", 1000)
    writer = RecordWriter(tmp_path, Plan(batch=2, epochs=1), {}, {"step": 0})
    taken = [step(number) for number in range(1, 2001)]
    for one in taken:
        writer.append(one)
    writer.close()
    steps = Record.read(Path()).steps
    assert len(pickle.dumps(steps)) < 20 * len(taken)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert (len(steps), steps[0], steps[-1], steps[5:8]) == (2000, taken[0], taken[-1], taken[5:8])
    assert steps == taken
    assert steps != taken[1:]
    with pytest.raises(IndexError):
        steps[2000]
    (tmp_path / FILE).unlink()
    with pytest.raises(BadInput, match=r"record\.jsonl is not a record of a run: No such file"):
        list(steps)


def test_the_number_of_a_damaged_line_is_found_without_reading_all_before_it_at_once(tmp_path: Path) -> None:
    path = written(tmp_path)
    num_before = len(path.read_bytes().splitlines())
    with path.open("a") as file:
        file.write('{"kind": "unknown"}\n' * BLOCK_BYTES + "{}\n")
    tracemalloc.start()
    with pytest.raises(BadInput, match=f"line {num_before + BLOCK_BYTES + 1}, "):
        Record.read(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < path.stat().st_size / 2


class Counted(io.BytesIO):
    """Counts the bytes that are read."""

    num_read = 0

    def read(self, size: int | None = -1) -> bytes:
        part = super().read(size)
        self.num_read += len(part)
        return part


@pytest.mark.parametrize("num_torn", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_the_end_of_a_long_record_is_found_from_its_end(num_torn: int) -> None:
    whole = 50 * BLOCK_BYTES
    file = Counted(b"x" * (whole - 1) + b"\n" + b"x" * num_torn)
    assert end_of_rows(file) == whole
    assert file.num_read <= num_torn + 2 * BLOCK_BYTES
    assert end_of_rows(io.BytesIO(b"x" * num_torn)) == 0


class Version(str):
    """As `torch.__version__` is."""


@pytest.mark.parametrize("shown", ["été", "half of a pair: \ud800", Version("2.13"), "null", None])
def test_whatever_json_writes_is_written_as_json_writes_it(shown: str | None, tmp_path: Path) -> None:
    numbers = {
        "loss": math.nan,
        "rate": 1e-5,
        "whole": 1e16,
        "large": math.inf,
        "count": 2**70,
        "numpy": np.float64(0.1),
    }
    rows = [
        replace(SUMMARY, shown=shown),
        replace(SUMMARY, shown=shown, valid=numbers),
        replace(EVALUATION, values=numbers),
    ]
    writer = RecordWriter(tmp_path, PLAN, MACHINE)
    for row in rows:
        writer.append(row)
    writer.close()
    lines = (tmp_path / FILE).read_text().splitlines()[1:]
    for line, row in zip(lines, rows, strict=True):
        found = json.loads(line)
        assert line.startswith(f'{{"kind": "{type(row).__name__.lower()}", ')
        assert json.dumps(found) == json.dumps({"kind": type(row).__name__.lower(), **vars(row)})
