"""`--profile`: real trainings, traced on all ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import evenstep
from evenstep.launcher.logs import merged
from evenstep.profiling.profiler import choose_steps
from evenstep.record import PARTS, Record
from evenstep.report import trace
from tests.fleet import run_processes
from tests.process import traced_task
from tests.process.traced_task import task
from tests.process.watched import RUN, train

NANOSECONDS = 0.002
"""Two of them, in microseconds: times are rounded to one."""


def spans(rank: int) -> list[tuple[str, str]]:
    """Name and lane of all that a rank did."""
    with gzip.open(RUN / trace.FILE, "rt") as file:
        events: list[dict[str, Any]] = [one for one in json.load(file)["traceEvents"] if one["pid"] == rank]
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    return [(one["name"], names[one["tid"]]) for one in events if one["ph"] == "X"]


def misplaced() -> list[str]:
    """Spans that overlap another of their lane and do not lie within it: viewers drop those."""
    with gzip.open(RUN / trace.FILE, "rt") as file:
        events = [one for one in json.load(file)["traceEvents"] if one["ph"] == "X"]
    found: list[str] = []
    inside: dict[Any, list[float]] = {}
    for one in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        ends = inside.setdefault((one["pid"], one["tid"]), [])
        while ends and ends[-1] <= one["ts"] + NANOSECONDS:
            ends.pop()
        if ends and one["ts"] + one["dur"] > ends[-1] + NANOSECONDS:
            found.append(one["name"])
        ends.append(one["ts"] + one["dur"])
    return found


def numbers(run: Path = RUN) -> list[dict[str, Any]]:
    """The table, as a file."""
    found: list[dict[str, Any]] = json.loads((run / "traces" / trace.NUMBERS).read_text())["ranks"]
    return found


def check_numbers(strategy: str) -> None:
    """Three steps, 4 to 6, in lanes, and all of their parts."""
    found = numbers()
    assert not misplaced()
    assert [one["rank"] for one in found] == list(range(2 if strategy in ("ddp", "fsdp") else 1))
    for one in found:
        assert one["steps"] == 3
        assert list(one["parts"]) == list(PARTS)
        assert one["step_seconds"] == pytest.approx(sum(one["parts"].values()))
        assert min(one["parts"][part] for part in PARTS if part not in ("communication", "bubble")) > 0
        assert (one["parts"]["communication"] > 0) is (strategy != "single")
        done = spans(one["rank"])
        assert {name for name, lane in done if lane == "steps"} == {f"evenstep: step {step}" for step in (4, 5, 6)}
        assert {"input", "compute"} <= {lane for _, lane in done}
        assert ("communication" in {lane for _, lane in done}) is (strategy != "single")


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_trace_has_all_parts_of_each_step(strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    devices = "cpu,cpu" if strategy == "dp" else "cpu"
    evenstep.train(task, name="one", strategy=strategy, devices=devices, steps=8, profile=3, threads=1)
    check_numbers(strategy)
    said = capfd.readouterr().err
    assert f"trace of steps 4 to 6: {RUN}/trace.json.gz; open it at https://ui.perfetto.dev" in said


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_trace_of_several_processes_has_all_parts_and_json_is_json(strategy: str) -> None:
    options = ("--strategy", strategy, "--devices", "cpu,cpu", "--steps", "8", "--profile", "3", "--name", "one")
    ended = train(*options, "--json", WIDTH="512")
    check_numbers(strategy)
    # What programs read is untouched, and people are told on stderr.
    assert json.loads(ended.stdout)["steps"] == 8
    assert f"trace of steps 4 to 6: {RUN}/trace.json.gz; open it at https://ui.perfetto.dev" in ended.stderr
    assert f" {numbers()[0]['step_seconds'] * 1e3:.2f} " in ended.stderr
    assert "warn" not in ended.stderr.lower()
    assert "USDT" not in ended.stderr


def test_a_traced_training_learns_what_another_does_with_micro_batches_and_dp() -> None:
    choices: dict[str, Any] = {
        "strategy": "dp",
        "devices": "cpu,cpu",
        "accumulate": 2,
        "epochs": 2,
        "progress": False,
        "threads": 1,
    }
    plain = evenstep.train(task, name="plain", **choices)
    traced = evenstep.train(task, name="one", profile=4, **choices)
    assert traced.losses == plain.losses
    (found,) = numbers()
    # Steps 4 to 7: an epoch ends after the fourth, with an evaluation and a checkpoint.
    assert found["steps"] == 4
    forwards = [name for name, lane in spans(0) if name == "evenstep: forward" and lane != "compute"]
    assert len(forwards) == 4 * 2 * 2


def test_a_resumed_training_is_traced_from_where_it_goes_on_and_a_trace_is_not_inherited() -> None:
    choices: dict[str, Any] = {"progress": False, "threads": 1, "devices": "cpu"}
    evenstep.train(task, name="before", steps=4, profile=1, **choices)
    record = evenstep.train(task, name="one", resume="runs/before", profile=3, steps=9, **choices)
    assert record.steps[0].step == 5
    assert {name for name, lane in spans(0) if lane == "steps"} == {f"evenstep: step {step}" for step in (7, 8, 9)}
    third = evenstep.train(task, name="third", resume="runs/one", steps=10, **choices)
    assert third.plan.profile is None
    assert not Path("runs/third/traces").exists()


@pytest.mark.slow
def test_after_a_crash_in_mid_trace_the_restarted_run_is_traced() -> None:
    options = ("--strategy", "ddp", "--devices", "cpu,cpu", "--profile", "4", "--name", "one")
    ended = train(*options, "--restarts", "1", "--checkpoint-every", "2", MISHAP="kill")
    assert "restart 1 of 1" in ended.stderr
    # From step 4 on it goes on, and warms up anew.
    first = Record.read(RUN).restarts[0]["step"] + 4
    assert f"trace of steps {first} to {min(first + 3, 12)}" in ended.stderr
    assert [one["rank"] for one in numbers()] == [0, 1]


def test_a_trace_that_cannot_be_written_is_one_warning_and_training_continues(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traced_task, "MISHAP", "no folder")
    record = evenstep.train(task, name="one", profile=2, threads=1, devices="cpu")
    assert len(record.steps) == 12
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert warning.startswith("warning: no trace of rank 0 (FileExistsError: ")
    assert warning.endswith("; training continues")


@pytest.mark.slow
def test_a_rank_without_a_trace_leaves_those_of_the_others() -> None:
    ended = train("--strategy", "ddp", "--devices", "cpu,cpu", "--profile", "2", "--name", "one", MISHAP="no file")
    assert "warning: no trace of rank 1 (IsADirectoryError" in ended.stderr
    assert [one["rank"] for one in numbers()] == [0]


@pytest.mark.slow
def test_what_another_machine_traced_is_sent_to_rank_0(tmp_path: Path) -> None:
    run_processes(Path(__file__).with_name("profile_script.py"), [str(tmp_path)], 2, tmp_path / "logs")
    first, second = tmp_path / "machine0", tmp_path / "machine1"
    assert not (second / "traces" / "ranks.json").exists()
    sent = (second / "traces" / "rank1.json.gz").read_bytes()
    assert (first / "traces" / "rank1.json.gz").read_bytes() == sent
    said = merged(first)
    assert said[0].startswith("trace of steps 4 to 5: ")
    assert [one["rank"] for one in numbers(first)] == [0, 1]


def test_steps_are_traced_after_a_warm_up_as_far_as_there_are_enough() -> None:
    assert choose_steps(10, 0, None) == range(4, 14)
    assert choose_steps(10, 100, 112) == range(103, 113)
    assert choose_steps(10, 0, 5) == range(2, 6)
    assert choose_steps(10, 0, 1) == range(1, 2)
    assert not choose_steps(10, 5, 5)
