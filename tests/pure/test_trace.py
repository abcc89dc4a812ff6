"""Timelines made by hand: how they are put together, and what is computed from them."""

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
from evenstep.report.trace import RankTrace, common, holds, length, merge, union, without

HOST, MAIN, REPLICA, GLOO, AUTOGRAD = 4711, 1, 2, 3, 4
BASE = 1_790_857_026_000_000_000
Event = dict[str, Any]

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def moments(spans: list[Any]) -> set[int]:
    return {moment for begin, end in spans for moment in range(int(begin), int(end))}


@given(SPANS, SPANS)
def test_stretches_of_time_are_added_and_taken_away_as_their_moments_are(some: Any, others: Any) -> None:
    first, second = union(some), union(others)
    assert moments(first) == moments(some)
    assert moments(common(first, second)) == moments(some) & moments(others)
    assert moments(without(first, second)) == moments(some) - moments(others)
    assert length(first) == len(moments(some))
    assert {moment for moment in range(31) if holds(first, moment, moment)} == moments(some)


def test_a_small_gap_is_closed_and_a_larger_one_is_not() -> None:
    assert union([(0, 10), (12, 20), (30, 40)], gap=2) == [(0, 20), (30, 40)]


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


WHOLE = {"input": 100, "forward": 300, "backward": 400, "communication": 0, "optimizer": 200}


def test_a_step_that_sends_nothing_is_made_of_its_phases() -> None:
    assert parts(a_step()) == WHOLE


def test_several_steps_give_the_mean_and_what_lies_between_them_does_not_count() -> None:
    evaluating = [mark("evaluating", 1000, 5000), span("aten::mm", 1000, 5000)]
    assert parts([*a_step(), *evaluating, *a_step(5000, number=5)]) == WHOLE


def test_communication_is_hidden_as_far_as_something_is_computed_meanwhile() -> None:
    backward = [span("aten::mm", 400, 550), span("autograd::engine::evaluate_function: AccumulateGrad", 550, 800)]
    sent = [span("gloo:all_reduce", 450, 750, GLOO, "user_annotation"), span("aten::copy_", 460, 740, GLOO)]
    assert parts([*a_step(), *backward, *sent]) == {**WHOLE, "backward": 200, "communication": 200}
    (found,) = trace.numbers("all.json.gz")
    assert found.communication_seconds == pytest.approx(300e-6)


def test_a_function_in_autograd_that_waits_is_no_computing_and_a_moment_between_operations_is() -> None:
    waits = [span("RegisterPostBackwardFunctionBackward", 400, 600), span("c10d::_reduce_scatter_base_", 400, 600)]
    computes = [span("aten::mm", 600, 680), span("aten::mm", 720, 800)]
    sent = [span("gloo:reduce_scatter", 400, 800, GLOO, "user_annotation")]
    assert parts([*a_step(), *waits, *computes, *sent]) == {**WHOLE, "backward": 200, "communication": 200}


def test_what_dp_copies_between_its_replicas_is_communication_and_replicas_speak_before_the_main_thread() -> None:
    events = [
        mark("step 4", 0, 1000),
        mark("input", 0, 100),
        mark("forward", 100, 700),
        mark("replicate", 100, 200),
        span("aten::_foreach_copy_", 110, 190),
        mark("forward", 220, 400, REPLICA),
        span("aten::mm", 220, 400, REPLICA),
        mark("backward", 400, 690, REPLICA),
        mark("backward", 700, 850),
        mark("reduce", 710, 810),
        mark("optimizer", 850, 1000),
    ]
    assert parts(events) == {"input": 100, "forward": 210, "backward": 340, "communication": 200, "optimizer": 150}


def test_what_a_gpu_does_belongs_to_what_the_host_was_doing_when_it_asked() -> None:
    host = [launch(150, 1), launch(450, 2, AUTOGRAD), span("autograd::engine::x", 450, 460, AUTOGRAD), launch(850, 3)]
    gpu = [on_gpu("gemm", 160, 500, 1), on_gpu("gemm_bwd", 500, 850, 2), on_gpu("adam", 900, 950, 3)]
    # Until 850 the card has its say, and the host where the card has nothing to do.
    assert parts([*a_step(), *host, *gpu]) == {
        "input": 100,
        "forward": 400,
        "backward": 350,
        "communication": 0,
        "optimizer": 150,
    }


def test_kernels_of_nccl_are_hidden_behind_other_kernels_and_have_a_stream_with_their_name() -> None:
    host = [launch(410, 1), launch(420, 2)]
    gpu = [on_gpu("gemm", 420, 600, 1), on_gpu("ncclDevKernel_AllReduce_Sum_f32", 500, 750, 2, stream=20)]
    assert parts([*a_step(), *host, *gpu]) == {**WHOLE, "backward": 250, "communication": 150}
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
    merged(rank_file(a_step(), 0), rank_file(a_step(), 1))
    found = trace.numbers("all.json.gz")
    title, first, second = trace.lines(found)
    assert title.split() == ["rank", "step", "ms", "input", "forward", "backward", "not", "hidden", "optimizer"]
    assert first.split() == ["0", "1.00", "0.10", "10%", "0.30", "30%", "0.40", "40%", "0.00", "0%", "0.20", "20%"]
    assert second.split()[0] == "1"
    trace.write_numbers(found, Path("numbers.json"))
    assert json.loads(Path("numbers.json").read_text())["ranks"][1]["parts"]["forward"] == pytest.approx(300e-6)
    assert [one.accounted for one in found] == pytest.approx([1, 1])


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"traceEvents": 3}', '{"traceEvents": []}', "\x00"])
def test_a_file_that_is_no_trace_of_ours_is_refused_by_name(content: str) -> None:
    Path("odd.json").write_text(content)
    with pytest.raises(BadInput, match=r"odd\.json .*--profile writes"):
        trace.numbers("odd.json")
    Path("odd.json.gz").write_text(content)
    with pytest.raises(BadInput, match="odd"):
        merge([RankTrace(0, Path("odd.json.gz"))], Path("all.json.gz"))


def test_a_trace_without_a_step_is_not_merged() -> None:
    with pytest.raises(BadInput, match="no step was traced"):
        merge([rank_file([span("aten::mm", 0, 1)])], Path("all.json.gz"))
