"""Every strategy learns what one device learns: the same losses, the same weights, the same evaluation."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from evenstep.plan import Plan
from tests.fleet import Result, furthest, result, run_jobs
from tests.marks import num_steps
from tests.more_flags import more_fields
from tests.small_tasks import LOSSES, MODELS, NUM_VALID, OPTIMIZERS

STEPS = num_steps(15, 50)  # into the second epoch of 11 steps, or into the fifth
BATCH = 10  # 3 devices get 4, 3 and 3; the last batch of an epoch holds 3 samples
WORLDS = {"dp-2": 1, "dp-3": 1, "ddp-2": 2, "ddp-3": 3, "fsdp-2": 2}
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4}
CASES = [
    (f"{model}/{optimizer}/{loss}", accumulate, precision)
    for model, optimizer, loss, accumulate, precision in product(MODELS, OPTIMIZERS, LOSSES, (1, 3), TOLERANCE)
]
# Without `slow`: every model, optimizer, loss and accumulation, though not every combination.
QUICK = [(f"{model}/{kind}", num, "fp64") for model in MODELS for kind, num in (("adamw/mean", 3), ("sgd/pair", 1))]


def plan(where: str, accumulate: int, precision: str) -> Plan:
    strategy, _, num = where.partition("-")
    return Plan(
        strategy=strategy,
        devices=("cpu",) * int(num or 1),
        batch=BATCH,
        steps=STEPS,
        accumulate=accumulate,
        precision=precision,
        clip=1.0,
        threads=1,
        **more_fields(int(num or 1), strategy),
    )


def name(where: str, case: tuple[str, int, str]) -> str:
    return "_".join([where, *map(str, case)]).replace("/", "-")


def is_quick(where: str, case: tuple[str, int, str]) -> bool:
    if case not in QUICK:
        return False
    # Every network by ddp; the others, and three ranks, with the smallest one.
    return case[0].startswith("mlp") or (where == "ddp-2" and case[0].endswith("sgd/pair"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    of_this = [item.callspec.params for item in request.session.items if item.path == request.path]
    wanted = dict.fromkeys((where, one["case"]) for one in of_this for where in ("single", one["where"]))
    for size in (1, 2, 3):
        pairs = [(where, case) for where, case in wanted if {"single": 1, **WORLDS}[where] == size]
        if pairs:
            run_jobs(folder, size, [(name(w, c), plan(w, *c[1:]), c[0]) for w, c in pairs])
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("where", "case"),
    [
        pytest.param(w, c, id="-".join(map(str, [w, *c])), marks=() if is_quick(w, c) else pytest.mark.slow)
        for w in WORLDS
        for c in CASES
    ],
)
def test_learns_the_same_as_single(trained: Path, where: str, case: tuple[str, int, str]) -> None:
    tolerance = TOLERANCE[case[2]]
    single, other = result(trained, name("single", case)), result(trained, name(where, case))
    assert len(single.record.losses) == STEPS
    assert other.record.losses == pytest.approx(single.record.losses, rel=tolerance)
    assert furthest(other.weights, single.weights) < tolerance
    check_evaluation(single, other, tolerance)


def check_evaluation(single: Result, other: Result, tolerance: float) -> None:
    assert len(single.record.evaluations) == 1 + STEPS // 11
    for ours, reference in zip(other.record.evaluations, single.record.evaluations, strict=True):
        assert ours.samples == NUM_VALID
        assert ours.values == pytest.approx(reference.values, rel=tolerance)
