"""Three real processes fit one Scaler: all hold the same bits, which are scikit-learn's numbers on the whole data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from evenstep.training.team import join
from tests.fleet import run_processes
from tests.process.feature_scaler_script import NUM_RANKS, images, report, table


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("scale")
    run_processes(
        Path(__file__).with_name("feature_scaler_script.py"),
        [request.param, str(folder / "out.json")],
        NUM_RANKS,
        folder / "logs",
    )
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def alone() -> Any:
    return report(join("single", devices=("cpu",), precision="fp64"))


def check_like_sklearn(statistics: dict[str, Any], rows: torch.Tensor) -> None:
    theirs = StandardScaler().fit(rows.double().numpy())
    np.testing.assert_allclose(statistics["mean"], theirs.mean_, rtol=1e-12, atol=0)
    np.testing.assert_allclose(statistics["deviation"], theirs.scale_, rtol=1e-12, atol=0)
    assert statistics["count"] == len(rows)


def test_all_ranks_hold_the_same_bits_and_they_are_scikit_learns(reports: Any) -> None:
    assert len(reports) == NUM_RANKS
    assert all(each["table"] == reports[0]["table"] for each in reports)
    check_like_sklearn(reports[0]["table"], table())


def test_a_rank_without_a_picture_knows_what_the_others_saw(reports: Any) -> None:
    assert [each["pictures"] for each in reports] == [1, 1, 0]
    assert all(each["images"] == reports[0]["images"] for each in reports)
    check_like_sklearn(reports[0]["images"], images().movedim(1, -1).reshape(-1, 3))


def test_when_no_rank_has_a_sample_all_of_them_say_so(reports: Any) -> None:
    said = {each["refused"] for each in reports}
    assert said == {"a Scaler has nothing to be fitted to: no process has a sample"}


def test_training_behind_it_gives_the_losses_of_one_process_and_leaves_it_as_it_is(reports: Any, alone: Any) -> None:
    for each in reports:
        assert each["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        assert each["after training"] == each["table"]


def test_replicas_train_behind_it_as_one_device_does(alone: Any) -> None:
    replicas = report(join("dp", devices=("cpu", "cpu"), precision="fp64"))
    assert replicas["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert replicas["table"] == replicas["after training"] == alone["table"]
