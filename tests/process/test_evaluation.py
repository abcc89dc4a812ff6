"""Every sample of an evaluation counts once, on any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.plan import Plan
from tests.fleet import result, run_jobs
from tests.small_tasks import NUM_VALID


@pytest.mark.timeout(240)
def test_101_samples_give_the_same_numbers_on_1_2_and_3_processes(tmp_path: Path) -> None:
    values: dict[str, list[dict[str, float]]] = {"mean": [], "penalty": []}
    for size in (1, 2, 3):
        plan = Plan(strategy="ddp", devices=("cpu",) * size, batch=16, steps=1, precision="fp64", threads=1)
        # SGD with its learning rate at zero: the weights are the same to the last bit.
        run_jobs(tmp_path, size, [(f"{loss}-{size}", plan, f"mlp/still/{loss}") for loss in values])
        for loss, of_loss in values.items():
            (evaluation,) = result(tmp_path, f"{loss}-{size}").record.evaluations
            assert evaluation.samples == NUM_VALID == 101
            of_loss.append(evaluation.values)
    for one, *others in values.values():
        for other in others:
            assert other["accuracy"] == one["accuracy"]
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-12)
