"""Checkpoints of sharded models: every rank writes its rows into one file of whole tensors, and reads them from it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from evenstep.checkpoint import atomic_write, files, integrity
from evenstep.checkpoint.sharded_safetensors import TensorFile, stored_tensors
from evenstep.errors import CheckpointError
from evenstep.plan import Plan
from tests.fleet import furthest, result, run_jobs, run_processes

pytestmark = pytest.mark.timeout(300)
SCRIPT = Path(__file__).with_name("sharded_checkpoint_script.py")


def plan(strategy: str, size: int, steps: int, **more: object) -> Plan:
    fields = {"batch": 12, "steps": steps, "precision": "fp64", "threads": 1, "checkpoint_every": 3} | more
    return Plan(strategy=strategy, devices=("cpu",) * size, **fields)


def test_resume_between_strategies_and_sizes(tmp_path: Path) -> None:
    """fsdp on three ranks (rows that do not divide), then fsdp on two, ddp and single."""
    key = "tied/adamw/mean"
    run_jobs(tmp_path, 1, [("whole", plan("single", 1, 9), key)])
    run_jobs(tmp_path, 3, [("first", plan("fsdp", 3, 9), key)])
    start = str(tmp_path / "first" / "checkpoints" / files.step_name(6))
    again = [(strategy, plan(strategy, 2, 9, resume=start), key) for strategy in ("fsdp", "ddp")]
    run_jobs(tmp_path, 2, again)
    reference = result(tmp_path, "whole")
    for name in ("first", "fsdp", "ddp"):
        assert furthest(result(tmp_path, name).weights, reference.weights) < 1e-9


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "whole": torch.randn(5, 3, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "turned": torch.randn(4, 6, generator=generator).t(),
        "number": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(3, dtype=torch.complex64, generator=generator),
        "none": torch.empty(0, 4),
    }
    TensorFile(tensors, {"format": "pt"}).write(tmp_path / "ours.safetensors")
    save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "theirs.safetensors")
    for found in (load_file(tmp_path / "ours.safetensors"), load_file(tmp_path / "theirs.safetensors")):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    stored = stored_tensors(tmp_path / "ours.safetensors")
    assert torch.equal(stored["whole"].read(1, 3), tensors["whole"][1:3])
    assert torch.equal(stored["number"].read(), tensors["number"])


def test_a_type_that_the_format_lacks_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"odd is torch.complex128, which a safetensors file cannot hold"):
        TensorFile({"odd": torch.zeros(2, dtype=torch.complex128)})


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("saved")
    run_processes(SCRIPT, [str(folder)], 2, folder / "logs")
    found: dict[str, object] = json.loads((folder / "seen.json").read_text())
    return found


def test_no_rank_holds_a_whole_tensor_while_it_saves(seen: dict[str, object]) -> None:
    assert seen["whole_tensors"] == 0


def test_ranks_without_the_folder_send_what_they_hold(seen: dict[str, object]) -> None:
    assert seen["gathered_is_same"] is True


def test_a_large_checkpoint_is_finished_while_the_training_continues(seen: dict[str, object]) -> None:
    assert seen["is_there_at_once"] is False
    assert seen["is_there_after_settle"] is True


def test_ranks_write_a_checkpoint_over_one_that_would_be_deleted(seen: dict[str, object]) -> None:
    assert seen["written_over"]
    assert seen["written_over_is_same"]
    assert seen["spares"] == []


def test_a_failure_in_the_background_is_raised_on_all_ranks_before_the_next_save(seen: dict[str, object]) -> None:
    words = "the checkpoint of step 0 could not be written (rank 0: OSError: disk full)"
    assert all(words in one for one in seen["failures"])
    assert len(seen["failures"]) == 2


def test_a_failure_in_the_background_leaves_the_checkpoint_before_as_the_last(seen: dict[str, object]) -> None:
    assert seen["saved_before"] is True


def test_a_sharded_tensor_that_a_loop_adds_is_saved_whole(seen: dict[str, object]) -> None:
    assert seen["shadow_is_whole"] is True


def test_a_tensor_that_no_file_can_hold_stops_all_ranks(seen: dict[str, object]) -> None:
    assert all("0 is torch.complex128, which a safetensors file cannot hold" in one for one in seen["odd"])
    assert len(seen["odd"]) == 2


def test_a_checkpoint_in_the_background_can_be_loaded(seen: dict[str, object]) -> None:
    assert seen["loaded"] == ["read", "read"]


def test_after_a_tensor_that_cannot_be_written_the_others_are(tmp_path: Path) -> None:
    """Whatever the reason: other ranks may wait for this one to send its part of the next tensor."""
    file = TensorFile({"a": torch.ones(3, device="meta"), "b": torch.ones(3, dtype=torch.float64)})
    read: list[str] = []
    file.create(tmp_path / "file")
    part = file._part
    file._part = lambda tensor, **more: read.append(str(tensor.device)) or part(tensor, **more)  # type: ignore
    with pytest.raises(NotImplementedError):
        file.fill(tmp_path / "file", is_main=True)
    assert read == ["meta", "cpu"]


def test_no_two_checkpoints_are_written_to_folders_of_one_name(tmp_path: Path) -> None:
    """A rank on another machine that finds a folder of this name there takes it for this one."""
    assert atomic_write.begin(tmp_path, 1) != atomic_write.begin(tmp_path, 1)


def test_a_rank_that_cannot_write_stops_all_and_leaves_nothing(seen: dict[str, object]) -> None:
    assert all("OSError: no space)" in one for one in seen["stopped"])
    assert seen["left"] == []


def test_a_killed_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """The files of a checkpoint that was begun are not one, and the next save removes them."""
    atomic_write.write(tmp_path, 1, {name: lambda path: path.write_text("{}") for name in (files.WEIGHTS, files.STATE)})
    beside = atomic_write.begin(tmp_path, 2)
    TensorFile({"w": torch.ones(3)}).create(beside / files.WEIGHTS)
    assert [path.name for path in integrity.whole(tmp_path)] == [files.step_name(1)]
    atomic_write.prune(tmp_path, 2)
    assert not beside.exists()
    assert os.readlink(tmp_path / "latest") == files.step_name(1)
