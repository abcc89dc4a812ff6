"""Timelines made by hand, and how they are merged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import BadInput
from evenstep.report import trace
from evenstep.report.trace import RankTrace, holds, merge, union

HOST, MAIN, REPLICA, GLOO, AUTOGRAD = 4711, 1, 2, 3, 4
BASE = 1_790_857_026_000_000_000
Event = dict[str, Any]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_joined_spans_hold_the_same_time(spans: Any) -> None:
    inside = {time for begin, end in spans for time in range(begin, end)}
    assert {time for time in range(31) if holds(union(spans), time, time)} == inside


def span(name: str, begin: float, end: float, thread: int = MAIN, cat: str = "cpu_op", **more: Any) -> Event:
    event = {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": thread, "ts": begin, "dur": end - begin}
    return {**event, "args": {}, **more}


def mark(name: str, begin: float, end: float, thread: int = MAIN) -> Event:
    return span(f"evenstep: {name}", begin, end, thread, "user_annotation")


def on_gpu(name: str, begin: float, end: float, correlation: int, cat: str = "kernel", stream: int = 7) -> Event:
    return span(name, begin, end, stream, cat, pid=0, args={"correlation": correlation})


def launch(at: float, correlation: int, thread: int = MAIN) -> Event:
    return span("cudaLaunchKernel", at, at + 1, thread, "cuda_runtime", args={"correlation": correlation})


def a_step(first: float = 0, number: int = 4) -> list[Event]:
    """A step of 1000 us: 100 of input, 300 of forward, 400 of backward and 200 of the optimizer."""
    return [
        mark(f"step {number}", first, first + 1000),
        mark("input", first, first + 100),
        mark("forward", first + 100, first + 400),
        mark("backward", first + 400, first + 800),
        mark("optimizer", first + 800, first + 1000),
    ]


def rank_file(events: list[Event], rank: int = 0, machine: str = "a", base: int = BASE) -> RankTrace:
    path = Path(f"rank{rank}.json.gz")
    with gzip.open(path, "wt") as file:
        json.dump({"baseTimeNanoseconds": base, "traceEvents": events}, file)
    return RankTrace(rank, path, machine)


def merged(*files: RankTrace) -> list[Event]:
    merge(files, Path("all.json.gz"))
    with gzip.open("all.json.gz", "rt") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return events


def parts(events: list[Event]) -> dict[str, float]:
    """Microseconds of a step in each part, as one rank's trace has it."""
    merged(rank_file(events))
    (found,) = trace.numbers("all.json.gz")
    return {name: round(seconds * 1e6, 3) for name, seconds in found.parts.items()}


def test_a_stream_of_nccl_has_its_name() -> None:
    host = [launch(410, 1), launch(420, 2)]
    gpu = [on_gpu("gemm", 420, 600, 1), on_gpu("ncclDevKernel_AllReduce_Sum_f32", 500, 750, 2, stream=20)]
    names = {
        event["args"]["name"]
        for event in merged(rank_file([*a_step(), *host, *gpu]))
        if event["ph"] == "M" and "name" in event["args"]
    }
    assert {"cuda:0 stream 7", "cuda:0 stream 20, communication"} <= names


def lanes(events: list[Event], rank: int) -> dict[str, str]:
    """The lane in which each span of a rank lies."""
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == rank
    }
    return {event["name"]: names[event["tid"]] for event in events if event["ph"] == "X" and event["pid"] == rank}


def test_every_rank_is_a_process_with_lanes_that_have_names() -> None:
    more = [
        span("aten::index", 10, 90),
        span("aten::mm", 410, 500),
        span("gloo:all_reduce", 450, 600, GLOO, "user_annotation"),
        span("aten::pin_memory", 300, 400, 99),
    ]
    events = merged(rank_file([*a_step(), *more], 0), rank_file([*a_step(), *more], 1))
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    for rank in (0, 1):
        found = lanes(events, rank)
        assert found["evenstep: step 4"] == "steps"
        assert found["evenstep: input"] == found["aten::index"] == "input"
        assert found["evenstep: backward"] == found["aten::mm"] == "compute"
        assert found["gloo:all_reduce"] == "communication"
        assert found["aten::pin_memory"] == "input 2"


def test_arrows_of_different_ranks_are_kept_apart() -> None:
    arrow = [{"ph": "s", "id": 5, "pid": HOST, "tid": MAIN, "ts": 150, "cat": "fwdbwd", "name": "fwdbwd"}]
    events = merged(rank_file([*a_step(), *arrow], 0), rank_file([*a_step(), *arrow], 1))
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2


def begins(events: list[Event]) -> list[float]:
    return [event["ts"] for event in events if event["name"] == "evenstep: step 4"]


def test_ranks_of_one_machine_keep_their_times_though_they_count_from_different_ones() -> None:
    later = [{**event, "ts": event["ts"] + 30.0} for event in a_step(2000)]
    files = rank_file(a_step(2000), 0), rank_file(later, 1, base=BASE + 5_000_000)
    assert begins(merged(*files)) == pytest.approx([0, 5030])


def test_machines_whose_clocks_differ_are_brought_together_at_the_barrier() -> None:
    first = [mark("together", 1000, 1010), *a_step(2000)]
    second = [{**event, "ts": event["ts"] + 7_000_000.0} for event in [mark("together", 1000, 1010), *a_step(2050)]]
    assert begins(merged(rank_file(first, 0, "a"), rank_file(second, 1, "b"))) == pytest.approx([0, 50])


def test_the_table_has_a_row_for_each_rank_and_the_file_the_same_numbers() -> None:
    parts = {"input": 1e-4, "forward": 3e-4, "backward": 4e-4, "communication": 0.0, "optimizer": 2e-4}
    found = [
        trace.RankNumbers(rank=0, steps=3, parts={**parts}),
        trace.RankNumbers(rank=1, steps=3, parts={**parts, "communication": None}),
    ]
    title, first, second = trace.lines(found)
    assert title.split() == ["rank", "step", "ms", "input", "forward", "backward", "not", "hidden", "optimizer"]
    assert first.split() == ["0", "1.00", "0.10", "10%", "0.30", "30%", "0.40", "40%", "0.00", "0%", "0.20", "20%"]
    assert second.split()[-3:] == ["-", "0.20", "20%"]
    trace.write_numbers(found, Path("numbers.json"))
    (_, second_rank) = json.loads(Path("numbers.json").read_text())["ranks"]
    assert second_rank["parts"] == {**parts, "communication": None}
    assert second_rank["step_seconds"] == pytest.approx(1e-3)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"traceEvents": 3}', '{"traceEvents": []}', "\x00"])
def test_a_file_that_is_no_trace_of_ours_is_refused_by_name(content: str) -> None:
    Path("odd.json").write_text(content)
    Path("odd.json.gz").write_text(content)
    with pytest.raises(BadInput, match="odd"):
        merge([RankTrace(0, Path("odd.json.gz"))], Path("all.json.gz"))


def test_a_trace_without_a_step_is_not_merged() -> None:
    with pytest.raises(BadInput, match="no step was traced"):
        merge([rank_file([span("aten::mm", 0, 1)])], Path("all.json.gz"))
