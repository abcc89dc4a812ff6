"""Three real processes: a slow one is named with the reason, a replica that drifts with its first parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import run_processes
from tests.process.stragglers_script import NUM_RANKS


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the ranks were told in each case, which is the same for all of them."""
    folder = tmp_path_factory.mktemp("pace")
    run_processes(Path(__file__).with_name("stragglers_script.py"), [str(folder)], 1, folder / "logs")
    reports = json.loads((folder / "out.json").read_text())
    told = [{case: line for case, line in report.items() if case != "probe seconds"} for report in reports]
    assert told[1:] == told[:-1]
    return reports[0]


def test_a_rank_that_computes_slowly_is_named(said: Any) -> None:
    assert said["slow compute"].startswith("rank 1 is slow: ")
    assert "late in every step, due to compute (its own " in said["slow compute"]


def test_a_rank_that_reads_slowly_is_named(said: Any) -> None:
    assert said["slow input"].startswith("rank 0 is slow: ")
    assert "late in every step, due to input (its own " in said["slow input"]


def test_it_is_said_again_only_if_it_got_much_worse(said: Any) -> None:
    assert said["the same again"] is None
    assert said["much worse"].startswith("rank 1 is slow: ")


@pytest.mark.parametrize("case", ["clean", "one long step", "too few steps", "fast links"])
def test_otherwise_nothing_is_said(said: Any, case: str) -> None:
    assert said[case] is None


def test_the_links_are_measured(said: Any) -> None:
    assert len(said["rates"]) == NUM_RANKS
    assert all(rate > 0 for rate in said["rates"])


def test_replicas_that_train_rightly_are_equal_though_their_statistics_are_not(said: Any) -> None:
    assert said["right"] == [None] * 3
    assert said["right again"] is None


def test_a_forward_around_the_wrapper_is_seen_at_the_next_look(said: Any) -> None:
    first, *causes = said["around the wrapper"].splitlines()
    assert first.startswith("replicas differ: 0.weight on ranks 1, 2 is not that of rank 0 (the first of ")
    assert first.endswith(" tensors that differ), seen after step 4; they were still equal at step 3.")
    assert "forward was called around the wrapper" in causes[0]


def test_one_bit_is_seen_and_its_rank_named(said: Any) -> None:
    assert said["one bit on rank 2"].startswith(
        "replicas differ: 3.bias on rank 2 is not that of the other ranks, seen"
    )
