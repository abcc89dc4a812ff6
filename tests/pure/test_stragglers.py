"""Who is called slow, from made-up numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenstep.monitor.stragglers import RankTimes, judge_links, late_ranks, needs_probe

FAST = RankTimes(
    steps=100, input=0.001, compute=0.007, rest=0.230, median_input=0.001, median_compute=0.007, median_own=0.008,
    since_probe=1e6,
)  # fmt: skip
SLOW_COMPUTE = replace(FAST, compute=0.210, median_compute=0.210, median_own=0.211, rest=0.027)
SLOW_INPUT = replace(FAST, input=0.210, median_input=0.210, median_own=0.217, rest=0.021)


def sentences(*rows: RankTimes) -> list[str]:
    return [late.sentence() for late in late_ranks(rows)]


def test_nobody_is_slow_among_equals() -> None:
    assert sentences(FAST, FAST, FAST) == []


def test_a_rank_that_computes_slowly_is_named() -> None:
    assert sentences(FAST, SLOW_COMPUTE) == [
        "rank 1 is slow: 203 ms late in every step, due to compute (its own 210 ms against 7 ms on the others)"
    ]


def test_a_rank_that_waits_for_its_input_is_named() -> None:
    assert sentences(SLOW_INPUT, FAST, FAST) == [
        "rank 0 is slow: 209 ms late in every step, due to input (its own 210 ms against 1 ms on the others)"
    ]


def test_the_latest_comes_first() -> None:
    later = replace(SLOW_COMPUTE, compute=0.4, median_compute=0.4, median_own=0.401)
    assert [late.rank for late in late_ranks([FAST, SLOW_COMPUTE, FAST, later, FAST])] == [3, 1]


@pytest.mark.parametrize(
    "row",
    [
        # One long step in a hundred: the mean alone says slow.
        replace(FAST, compute=0.210),
        # Most steps a little slow, and the mean not.
        replace(FAST, median_compute=0.1, median_own=0.101),
        # Straggler by less than a third of the step.
        replace(FAST, compute=0.067, median_compute=0.067, median_own=0.068, rest=0.170),
    ],
)
def test_what_is_not_so_at_every_step_or_costs_little_is_not_slow(row: RankTimes) -> None:
    assert sentences(FAST, row) == []


def test_a_few_milliseconds_are_not_slow_however_short_the_step() -> None:
    short = RankTimes(100, 0.0, 0.001, 0.018, 0.0, 0.001, 0.001)
    assert sentences(short, replace(short, compute=0.018, median_compute=0.018, median_own=0.018, rest=0.001)) == []


def test_links_are_looked_at_when_everybody_waits() -> None:
    assert needs_probe([FAST, FAST])
    assert not needs_probe([FAST, SLOW_COMPUTE])
    assert not needs_probe([replace(FAST, rest=0.010)] * 2)


def test_links_are_looked_at_every_few_minutes_by_the_clock_of_rank_0() -> None:
    assert not needs_probe([replace(FAST, since_probe=100.0), FAST])
    assert needs_probe([FAST, replace(FAST, since_probe=100.0)])


@pytest.mark.parametrize(
    ("megabits", "said"),
    [
        ([4100, 4000], None),
        ([4100, 250], None),
        ([900, 250, 4000], None),
        ([4100, 9], "rank 1 sends slowly: 9.0 Mbit/s against 4100 Mbit/s on the others (network)"),
        ([4100, 40, 3900], "rank 1 sends slowly: 40 Mbit/s against 4000 Mbit/s on the others (network)"),
        ([9, 12], "the links between the ranks are slow: 9.0 to 12 Mbit/s (network)"),
        ([100, 90, 110], "the links between the ranks are slow: 90 to 110 Mbit/s (network)"),
        ([150, 250], None),
    ],
)
def test_a_slow_link_is_named(megabits: list[float], said: str | None) -> None:
    found = judge_links([rate * 1e6 for rate in megabits])
    assert (found.sentence() if found else None) == said
