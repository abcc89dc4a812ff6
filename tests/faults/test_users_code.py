"""The user's code ends its rank, moves it, or makes another model on it: named as what it is, with an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.runs import FOLDER, fail, train


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_rank_that_leaves_without_a_word_is_the_cause_and_no_other(strategy: str) -> None:  # 36
    ended = train("--strategy", strategy, fault=fail("leave", rank=1, step=4))
    assert ended.code == 1
    assert ended.report[0] == "rank 1 exited with code 0 at step 4, in forward and left no report"
    assert "os._exit" in ended.report[1]


@pytest.mark.slow
def test_a_run_whose_ranks_all_leave_is_not_done() -> None:  # 36
    ended = train("--strategy", "ddp", fault=fail("leave", rank=0, step=4), devices=1)
    assert ended.code == 1
    assert ended.report[0].startswith("rank 0 exited with code 0 at step 4")


@pytest.mark.slow
def test_a_rank_that_went_elsewhere_still_leaves_its_report_here() -> None:  # 36
    ended = train(fault=fail("go elsewhere and stop", rank=1, step=4))
    assert ended.code == 1
    assert ended.report[0] == "rank 1 failed at step 4, in forward"
    assert "StopIteration" in ended.report
    assert any("faulty.py" in line and line.endswith("next(iter(()))") for line in ended.report)
    assert (FOLDER / "logs" / "rank1.error.json").is_file()


@pytest.mark.slow
def test_every_rank_of_a_task_that_goes_elsewhere_finds_it_and_leaves_its_run_here() -> None:  # 36
    Path("elsewhere").mkdir()
    ended = train("--restarts", "1", task="of_elsewhere", fault=fail("kill", rank=1, step=14))
    assert ended.code == 1, ended.err
    assert "restart 1 of 1, from step-00000011" in ended.err
    assert ended.report[0].startswith("rank 1 was ended by SIGKILL at step 14")
    assert list(Path("elsewhere").iterdir()) == [Path("elsewhere/happened")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_weights_of_another_type_on_one_rank_are_refused_by_name(strategy: str) -> None:
    ended = train("--strategy", strategy, "--stall-after", "20", fault=fail("double weights", rank=1, step=0))
    assert ended.code == 2, ended.err
    said = "rank 1 has built another model than rank 0: 0.weight is float64 [16, 4] on rank 1 and float32 [16, 4]"
    assert ended.report[0].startswith(said)
