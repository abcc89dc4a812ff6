"""With --replicas, a run has the same bits on any number of devices."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from evenstep.plan import Plan
from evenstep.record import Record
from tests.fleet import furthest, result, run_jobs
from tests.small_tasks import LOSSES, MODELS, OPTIMIZERS

STEPS = 60
BATCH = 17  # virtual replicas of 5, 4, 4 and 4 samples; the last batch of an epoch has one sample
V = 4
WORLDS = {"single": 1, "dp-2": 1, "dp-3": 1, "dp-4": 1, "ddp-1": 1, "ddp-2": 2, "ddp-3": 3, "ddp-4": 4}
QUICK_WORLDS = ("dp-2", "ddp-2", "ddp-4")
CASES = [
    (f"{model}/{optimizer}/{loss}/dropout", accumulate)
    for model, optimizer, loss, accumulate in product(MODELS, OPTIMIZERS, LOSSES, (1, 2))
]
QUICK = [("mlp/adamw/mean/dropout", 1), ("cnn/sgd/mean/dropout", 2), ("gpt/adamw/pair/dropout", 1)]
Case = tuple[str, int]


def plan(where: str, **more: object) -> Plan:
    strategy, _, num = where.partition("-")
    values = {"batch": BATCH, "steps": STEPS, "replicas": V, "clip": 1.0, **more}
    return Plan(strategy=strategy, devices=("cpu",) * int(num or 1), **values)


def digest(run: Path) -> str:
    """Of weights and optimizer state of the latest checkpoint."""
    content = hashlib.sha256()
    for file in ("weights", "optimizer"):
        for name, tensor in sorted(load_file(run / "checkpoints" / "latest" / f"{file}.safetensors").items()):
            content.update(name.encode())
            content.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


@pytest.mark.parametrize(("loss", "accumulate"), [("mean", 1), ("pair", 2)])
def test_they_learn_what_one_device_learns(tmp_path: Path, loss: str, accumulate: int) -> None:
    key = f"mlp/adamw/{loss}"
    plans = {"plain": {"replicas": None}, "virtual": {"accumulate": accumulate}}
    jobs = [(name, plan("single", precision="fp64", threads=1, **more), key) for name, more in plans.items()]
    run_jobs(tmp_path, 1, jobs)
    plain, virtual = (result(tmp_path, name) for name in plans)
    assert virtual.record.losses == pytest.approx(plain.record.losses, rel=1e-9)
    assert furthest(virtual.weights, plain.weights) < 1e-9
    for ours, theirs in zip(virtual.record.evaluations, plain.record.evaluations, strict=True):
        assert ours.values == pytest.approx(theirs.values, rel=1e-9)


def name(where: str, case: Case) -> str:
    return "_".join([where, *map(str, case)]).replace("/", "-")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    of_this = [item.callspec.params for item in request.session.items if item.path == request.path]
    wanted = dict.fromkeys((w, one["case"]) for one in of_this if "case" in one for w in ("single", one["where"]))
    for size in (1, 2, 3, 4):
        pairs = [(where, case) for where, case in wanted if WORLDS[where] == size]
        if pairs:
            run_jobs(folder, size, [(name(w, c), plan(w, accumulate=c[1]), c[0]) for w, c in pairs])
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("where", "case"),
    [
        pytest.param(
            *(where, case),
            id="-".join(map(str, [where, *case])),
            marks=() if where in QUICK_WORLDS and case in QUICK else pytest.mark.slow,
        )
        for where in WORLDS
        for case in CASES
        if where != "single"
    ],
)
def test_the_same_bits_on_any_number_of_devices(trained: Path, where: str, case: Case) -> None:
    single, other = (Record.read(trained / name(one, case)) for one in ("single", where))
    assert len(single.losses) == STEPS
    assert other.losses == single.losses
    assert [one.grad_norm for one in other.steps] == [one.grad_norm for one in single.steps]
    assert [one.values for one in other.evaluations] == [one.values for one in single.evaluations]
    assert digest(trained / name(where, case)) == digest(trained / name("single", case))
