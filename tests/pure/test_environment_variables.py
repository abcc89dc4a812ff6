"""Variables that torchrun, Slurm and others set: read once, and refused by name where they make no sense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import evenstep as library
from evenstep.distributed.worker_process import omp_num_threads, read_rank
from evenstep.errors import BadInput
from evenstep.launcher.rendezvous.slurm import find_slurm
from evenstep.launcher.variables import slurm_variables
from tests.pure.conftest import Ended

JOB = {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize("environment", [{}, {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}])
def test_a_process_alone_is_rank_0_of_1(environment: dict[str, str]) -> None:
    assert read_rank(environment) == (0, 1, 0)


def test_torchrun_says_who_a_process_is() -> None:
    assert read_rank({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (5, 8, 1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "abc"}, "the variable RANK is 'abc': expected int, got str; correct or unset it"),
        ({"RANK": "-1"}, "the variable RANK is '-1': expected int >= 0"),
        ({"RANK": "²"}, "the variable RANK is '²': expected int"),
        ({"RANK": "9" * 5000}, "the variable RANK is '9999"),
        ({"WORLD_SIZE": "0"}, "the variable WORLD_SIZE is '0': expected int >= 1"),
        ({"LOCAL_RANK": "1e400"}, "the variable LOCAL_RANK is '1e400'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "the variable RANK is 2 and WORLD_SIZE is 2: ranks go from 0 to 1; unset"),
        ({"RANK": "1"}, "the variable RANK is 1 and WORLD_SIZE is 1: ranks go from 0 to 0; unset both, or start"),
    ],
)
def test_a_rank_that_makes_no_sense_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_rank(environment)
    assert str(refused.value).startswith(message)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SLURM_JOB_ID", "seventy"),
        ("SLURM_PROCID", "-1"),
        ("SLURM_PROCID", "2"),
        ("SLURM_STEP_NUM_TASKS", "0"),
        ("SLURM_LOCALID", "²"),
        ("SLURM_NODEID", "9" * 5000),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x99999999999999)"),
        ("SLURM_STEP_TASKS_PER_NODE", "many"),
        ("SLURM_RESTART_COUNT", "1.5"),
    ],
)
def test_a_variable_of_slurm_that_makes_no_sense_is_refused(name: str, text: str) -> None:
    with pytest.raises(BadInput, match=f"the variable {name} is ") as refused:
        find_slurm(slurm_variables({**JOB, name: text}))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(("text", "num"), [("4", 4), ("0", None), ("", None), ("4,2", None), ("²", None), ("-1", None)])
def test_a_number_of_threads_is_taken_where_it_is_one(text: str, num: int | None) -> None:
    assert omp_num_threads({"OMP_NUM_THREADS": text}) == num


def test_a_command_refuses_them_before_anything_is_made(
    evenstep: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "abc")
    ended = evenstep("train", "digits")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: the variable RANK is 'abc': expected int, got str; correct or unset it\n"
    assert not Path("runs").exists()


def test_ranks_that_cannot_meet_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="MASTER_ADDR and MASTER_PORT do not say where the ranks meet"):
        library.join(devices=("cpu", "cpu"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(BadInput, match="the variable MASTER_PORT is 'http'"):
        library.join(devices=("cpu", "cpu"))
