"""The parts of a step, from the times at which each began."""

from __future__ import annotations

import pytest

from evenstep.profiling.step_parts import RankSpans, spans_of, timeline, usual_parts, within

DDP = [
    *(("input", 0.0), ("forward", 1.0), ("backward", 3.0), ("communication", 6.0), ("optimizer", 7.0)),
    *(("input", 8.0), ("forward", 8.5), ("backward", 10.0), ("communication", 13.0), ("optimizer", 15.0)),
    ("", 16.0),
]


def of_rank(begins: list[tuple[str, float]], later: float = 0.0) -> RankSpans:
    return RankSpans(
        spans_of([(name, when + later) for name, when in begins]), {}, [("bucket 0", 4.0 + later, 6.5 + later)]
    )


def test_each_lasts_until_the_next_and_repeats_are_one() -> None:
    assert spans_of([("a", 0.0), ("b", 1.0), ("b", 2.0), ("", 4.0), ("a", 5.0), ("", 6.0)]) == [
        ("a", 0.0, 1.0),
        ("b", 1.0, 4.0),
        ("a", 5.0, 6.0),
    ]


def test_the_parts_add_up_to_the_step() -> None:
    rank = of_rank(DDP)
    assert rank.steps == [(0.0, 8.0), (8.0, 16.0)]
    parts = rank.parts(0.0, 8.0)
    assert parts == {
        "input": 1.0,
        "forward": 2.0,
        "backward": 3.0,
        "communication": 1.0,
        "bubble": 0.0,
        "optimizer": 1.0,
    }
    assert sum(parts.values()) == 8.0


def test_several_devices_of_one_process_divide_the_time_that_the_host_waits() -> None:
    host = [("input", 0.0), ("replicate", 1.0), ("forward", 2.0), ("reduce", 8.0), ("optimizer", 9.0), ("", 10.0)]
    replicas = {
        "replica 0": spans_of([("forward", 2.0), ("backward", 3.0), ("", 6.0)]),
        "replica 1": spans_of([("forward", 2.5), ("backward", 3.5), ("", 8.0)]),
    }
    parts = RankSpans(spans_of(host), replicas, []).parts(0.0, 10.0)
    assert parts["communication"] == 2.0
    assert parts["forward"] == pytest.approx(6.0 * 2 / 9.5)
    assert sum(parts.values()) == pytest.approx(10.0)


def test_what_lies_outside_is_cut_off() -> None:
    assert within([("a", 0.0, 2.0), ("b", 2.0, 3.0), ("c", 5.0, 6.0)], 1.0, 2.5) == [("a", 1.0, 2.0), ("b", 2.0, 2.5)]


def test_a_timeline_counts_from_the_first_rank_and_travels_have_a_lane() -> None:
    shown = timeline([of_rank(DDP), of_rank(DDP, later=0.25)], 0, number=41)
    assert shown.step == 41
    lanes = [(lane.rank, lane.name) for lane in shown.lanes]
    assert lanes == [(0, "host"), (0, "network"), (1, "host"), (1, "network")]
    assert shown.lanes[0].spans[0] == ("input", 0.0, 1.0)
    assert shown.lanes[2].spans[0] == ("input", 0.25, 1.25)
    assert shown.lanes[3].spans == [("bucket 0", 4.25, 6.75)]


def test_the_usual_step_leaves_out_the_shortest_and_the_longest() -> None:
    begins = [("input", 0.0), ("forward", 1.0)]
    for begin in (2.0, 4.0, 6.0):
        begins += [("input", begin), ("forward", begin + 1.0)]
    begins += [("", 100.0)]
    parts = usual_parts([RankSpans(spans_of(begins), {}, [])])
    assert (parts["input"], parts["forward"]) == (1.0, 1.0)
