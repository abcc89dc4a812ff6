"""Gradients through shared memory: the same bits as gloo's, in every type and size, and nothing that stays behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from evenstep.distributed.shm import native
from tests.fleet import run_processes
from tests.marks import first_is_quick

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(300)


def named() -> set[str]:
    """Everything in /dev/shm."""
    return set(os.listdir("/dev/shm"))


@pytest.fixture(scope="module", params=[2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found, of so many."""
    folder = tmp_path_factory.mktemp("shared")
    run_processes(HERE / "shm_script.py", [str(folder / "out.json")], request.param, folder / "logs")
    every: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())
    if not every[0]["built"]:
        pytest.skip("no C compiler here")
    return every


def test_all_ranks_get_the_same_bits_and_two_get_those_of_gloo(found: list[dict[str, Any]]) -> None:
    assert len({one["shared"]["hash"] for one in found}) == 1
    assert max(one["shared"]["apart"] for one in found) < 0.02  # of bfloat16, added up in another order
    assert found[0]["shared"]["equal"] or len(found) > 2


def test_all_ranks_learn_the_same_weights_and_two_those_of_ddp(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["shared"]["learned"] == found[0]["shared"]["learned"]
    if len(found) == 2:
        assert found[0]["shared"]["learned"] == found[0]["gloo"]


def test_without_the_library_gradients_are_left_to_ddp(found: list[dict[str, Any]]) -> None:
    assert [one["without the library"] for one in found] == [False] * len(found)


def test_what_no_channel_averages_is_left_to_ddp(found: list[dict[str, Any]]) -> None:
    assert found[0]["left to DDP"] == {"fp32": False, "fp16": True, "sparse": True, "gaps": True}


def test_channels_and_models_beside_each_other_do_not_disturb_each_other(found: list[dict[str, Any]]) -> None:
    size = len(found)
    for one in found:
        assert one["shared"]["interleaved"] == [49.0 * size, 490.0 * size]
        assert one["two models"] == found[0]["two models"]
        assert one["mailbox"]


def test_the_first_rank_gets_sums_in_the_order_of_ranks_and_the_others_copies(found: list[dict[str, Any]]) -> None:
    assert [one["shared"]["one way"]["has sums"] for one in found] == [True] + [False] * (len(found) - 1)
    assert all(one["shared"]["one way"]["has copies"] for one in found)


def test_no_memory_is_left_open(found: list[dict[str, Any]]) -> None:
    assert [one["left"]["memfds"] for one in found] == [[]] * len(found)


@pytest.mark.parametrize("how", first_is_quick(["kill", "exit"]))
def test_a_rank_that_ends_in_mid_backward_is_noticed_and_leaves_nothing(tmp_path: Path, how: str) -> None:
    before = named()
    out = tmp_path / "out.json"
    run_processes(HERE / "lost_rank_script.py", [str(out), how], 1, tmp_path / "logs")
    said = json.loads(out.read_text())
    assert said["type"] == "RankLost"
    assert said["message"] == "rank 1 ended while this one waited for it: if it left a report, the cause is there"
    assert said["step"] == 5
    assert {name for name in named() - before if "evenstep" in name} == set()


def test_without_a_compiler_nothing_is_built_and_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert native.build(tmp_path) is None
    assert native.load(tmp_path) is None


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    assert native.build(tmp_path / "nowhere") is None
    assert native.load(tmp_path / "nowhere") is None


def test_a_library_of_another_source_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.build(tmp_path) is None:
        pytest.skip("no C compiler here")
    changed = tmp_path / "allreduce.c"
    changed.write_text(native.SOURCE.read_text() + "\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    native.load.cache_clear()
    assert native.load(tmp_path) is None
    native.load.cache_clear()
