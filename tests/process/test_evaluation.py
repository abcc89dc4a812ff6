"""Every sample of an evaluation counts once, on any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.plan import Plan
from tests.fleet import result, run_jobs
from tests.small_tasks import NUM_VALID


@pytest.mark.timeout(240)
def test_101_samples_give_the_same_numbers_on_1_2_and_3_processes(tmp_path: Path) -> None:
    values = []
    for size in (1, 2, 3):
        plan = Plan(strategy="ddp", devices=("cpu",) * size, batch=16, steps=1, precision="fp64", threads=1)
        # SGD with its learning rate at zero: the weights are the same to the last bit.
        run_jobs(tmp_path, size, [(f"ddp-{size}", plan, "mlp/still/mean")])
        (evaluation,) = result(tmp_path, f"ddp-{size}").record.evaluations
        assert evaluation.samples == NUM_VALID == 101
        values.append(evaluation.values)
    assert values[0]["accuracy"] == values[1]["accuracy"] == values[2]["accuracy"]
    for value in values[1:]:
        assert value["loss"] == pytest.approx(values[0]["loss"], rel=1e-12)
