"""A save that fails, is cut off, or is damaged later: the one before it is whole, and nobody is told otherwise."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evenstep.record import Record
from tests.faults.runs import CHECKPOINTS, FOLDER, audit, fail, said_by_ranks, saved_step, steps, train, weights

EVERY_3 = ("--checkpoint-every", "3")


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """runs/ on a disk of 4 MiB."""
    runs = Path("runs")
    runs.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(runs)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield runs
    subprocess.run(["umount", "-l", str(runs.absolute())], check=True)


def names_of_checkpoints() -> list[str]:
    return sorted(os.listdir(CHECKPOINTS))


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.usefixtures("small_disk")
def test_a_disk_that_fills_up_is_told_of_on_all_ranks_and_costs_no_checkpoint() -> None:  # 11
    ended = train(*EVERY_3, "--restarts", "2", fault=fail("fill", rank=0, step=8))
    assert ended.code == 1
    assert "the checkpoint of step 9 could not be written (rank 0: " in ended.report[0]
    assert "No space left on device" in ended.report[0]
    assert names_of_checkpoints() == ["latest", "step-00000003", "step-00000006"]
    assert saved_step() == 6
    (FOLDER.parent / "filler").unlink()
    assert train("--resume", "runs/one", name="two").code == 0


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_told_of_on_all_ranks_and_costs_no_checkpoint() -> None:  # 11
    ended = train(*EVERY_3, "--restarts", "2", fault=fail("limit files", rank=0, step=8), WIDTH="8192")
    assert ended.code == 1
    assert "the checkpoint of step 9 could not be written (rank 0: " in ended.report[0]
    assert said_by_ranks() == ["\n".join(ended.report[:2])] * 2
    assert names_of_checkpoints() == ["latest", "step-00000003", "step-00000006"]
    assert saved_step() == 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_every_point_of_a_save_it_always_has_a_whole_checkpoint(
    undisturbed: Callable[..., bytes],
) -> None:  # 12
    options = ("--checkpoint-every", "1", "--steps", "90", "--restarts", "90", "--audit")
    ended = train(*options, fault=fail("die in save", rank=0, step=0))
    assert ended.code == 0, ended.err
    num_points = int(Path("points").read_text().split()[0]) - 1
    assert len(Record.read(FOLDER).restarts) == num_points
    assert num_points >= 15
    assert num_points < 88, "the last two saves must be whole"
    assert steps() == list(range(1, 91))
    assert "0 repeated, 0 missed" in audit()
    assert names_of_checkpoints() == ["latest", "step-00000089", "step-00000090"]
    assert weights() == undisturbed("--steps", "90")


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("flip", "weights.safetensors is not what was written (SHA-256 differs)"),
        pytest.param(
            "truncate", "optimizer.safetensors is not what was written (SHA-256 differs)", marks=pytest.mark.slow
        ),
        pytest.param("delete", "state.json is missing", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_all_go_on_from_the_one_before(
    kind: str, refused: str, undisturbed: Callable[..., bytes]
) -> None:  # 13
    ended = train(*EVERY_3, "--restarts", "1", "--audit", fault=fail(kind, rank=1, step=8, once=True))
    assert ended.code == 0, ended.err
    assert f"step-00000006 is damaged: {refused}; using the one before it" in ended.err
    assert "restart 1 of 1, from step-00000003" in ended.err
    assert [restart["step"] for restart in Record.read(FOLDER).restarts] == [3]
    assert audit().startswith("62 samples x 2 epochs, 0 repeated, 0 missed")
    assert weights() == undisturbed()


@pytest.mark.slow
@pytest.mark.usefixtures("small_disk")
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step() -> None:  # 14
    subprocess.run(["mount", "-o", "remount,ro", "runs"], check=True)
    ended = train(*EVERY_3)
    assert ended.code == 2
    assert ended.report[0].startswith("runs/one cannot be written: Read-only file system")
    assert list(Path("runs").iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_deleted_while_it_trains_says_so_at_the_next_save() -> None:  # 14
    ended = train(*EVERY_3, fault=fail("delete the run", rank=1, step=8))
    assert ended.code == 1
    assert ended.report[0].startswith(
        f"the checkpoint of step 9 could not be written (rank 0: FileNotFoundError: {FOLDER.absolute()}"
    )
    assert "continue from" not in ended.report[-1]
    assert not CHECKPOINTS.exists()


@pytest.mark.slow
def test_checkpoints_that_are_deleted_while_it_trains_are_only_those_of_before() -> None:  # 14
    ended = train(*EVERY_3, fault=fail("delete the checkpoints", rank=1, step=8))
    assert ended.code == 0, ended.err
    assert saved_step() == 22


@pytest.mark.slow
def test_a_save_that_fails_on_a_rank_that_only_takes_part_is_none() -> None:  # 15
    ended = train(*EVERY_3, fault=fail("raise in save", rank=1, step=9))
    assert ended.code == 1
    assert ended.report[0] == "rank 1 failed at step 9, saving a checkpoint"
    assert "ValueError: the sky is falling" in ended.report
    assert names_of_checkpoints() == ["latest", "step-00000003", "step-00000006"]
    assert saved_step() == 6
