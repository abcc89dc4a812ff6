"""Tensor parallelism: the layers that are understood are split, and the training is that of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.plan import Plan
from tests.fleet import Result, furthest, result, run_jobs
from tests.small_tasks import NUM_VALID

STEPS = 14
BATCH = 10
TOLERANCE = 1e-9
MESHES = {"tensor=2": 2, "data=2,tensor=2": 4, "tensor=3": 3}
NETWORKS = ("encoder/adamw/pair", "gpt/sgd/pair", "mlp/adamw/mean", "gated/adamw/mean", "encoder_drop/sgd/pair")
CASES = [(mesh, network) for mesh in MESHES for network in NETWORKS]
DRAWS_PER_RANK = {("data=2,tensor=2", "gated/adamw/mean"), ("data=2,tensor=2", "encoder_drop/sgd/pair")}
"""With dropout, two replicas draw other masks than one device; those of one replica draw the same."""


def plan(mesh: str | None, accumulate: int = 1, **more: object) -> Plan:
    devices = ("cpu",) * (MESHES[mesh] if mesh is not None else 1)
    strategy = "single" if mesh is None else "tensor"
    values = {"batch": BATCH, "steps": STEPS, "precision": "fp64", "clip": 0.5, "threads": 1, "audit": True, **more}
    return Plan(strategy=strategy, devices=devices, mesh=mesh, accumulate=accumulate, **values)


def name(mesh: str | None, network: str) -> str:
    return f"{mesh or 'single'}-{network}".replace("/", "-").replace(",", "-")


def is_quick(mesh: str, network: str) -> bool:
    return mesh == "tensor=2" and network.startswith(("encoder/", "gated"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    items = [
        item.callspec.params for item in request.session.items if item.path == request.path and "mesh" in item.name
    ]
    of_this = [(one["mesh"], one["network"]) for one in items if "network" in one]
    wanted = dict.fromkeys([*((None, network) for _, network in of_this), *of_this])
    for size in (1, 2, 3, 4):
        pairs = [(mesh, network) for mesh, network in wanted if (1 if mesh is None else MESHES[mesh]) == size]
        if pairs:
            run_jobs(folder, size, [(name(*pair), plan(pair[0], 1), pair[1]) for pair in pairs])
    return folder


def check_same(one: Result, other: Result, tolerance: float = TOLERANCE) -> None:
    assert other.record.losses == pytest.approx(one.record.losses, rel=tolerance)
    assert furthest(other.weights, one.weights) < tolerance
    for ours, reference in zip(other.record.evaluations, one.record.evaluations, strict=True):
        assert ours.samples == NUM_VALID
        assert ours.values == pytest.approx(reference.values, rel=tolerance)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mesh", "network"),
    [
        pytest.param(*case, id=f"mesh-{name(*case)}", marks=() if is_quick(*case) else pytest.mark.slow)
        for case in CASES
        if case not in DRAWS_PER_RANK
    ],
)
def test_learns_the_same_as_single(trained: Path, mesh: str, network: str) -> None:
    check_same(result(trained, name(None, network)), result(trained, name(mesh, network)))
