"""Tensor parallelism and pipelines: a model that is split over ranks learns what it learns on one device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from evenstep.plan import Plan
from tests.fleet import Result, furthest, result, run_jobs
from tests.small_tasks import NUM_VALID

STEPS = 14
BATCH = 10
"""The last batch of an epoch has 3 samples."""
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Split:
    """How a model is split, and over how many ranks."""

    size: int
    mesh: str | None = None
    accumulate: int = 1
    schedule: str = "1f1b"

    @property
    def strategy(self) -> str:
        return (self.mesh or "single").rpartition(",")[2].partition("=")[0]

    @property
    def name(self) -> str:
        return f"{self.mesh or 'single'}-{self.accumulate}-{self.schedule}".replace(",", "-")


SINGLE = Split(1)
TENSOR = [
    Split(2, "tensor=2"),
    Split(4, "data=2,tensor=2", accumulate=2),
    Split(3, "tensor=3"),
    Split(4, "fsdp=2,tensor=2"),
    Split(4, "fsdp=2,tensor=2", accumulate=2),
    Split(8, "data=2,fsdp=2,tensor=2"),
]
PIPELINE = [
    Split(2, "pipeline=2", accumulate=3),
    Split(2, "pipeline=2", accumulate=4, schedule="gpipe"),
    Split(4, "pipeline=4", accumulate=4),
    Split(4, "pipeline=4", accumulate=2, schedule="gpipe"),
    Split(4, "data=2,pipeline=2", accumulate=3),
    Split(2, "pipeline=2", accumulate=3, schedule="zero-bubble"),
    Split(4, "pipeline=4", accumulate=4, schedule="zero-bubble"),
    Split(2, "pipeline=2", accumulate=3, schedule="interleaved"),
    Split(4, "pipeline=4", accumulate=5, schedule="interleaved"),
    Split(4, "data=2,pipeline=2", accumulate=2, schedule="interleaved"),
]
NETWORKS = {
    "tensor": ("encoder/adamw/pair", "gpt/sgd/pair", "mlp/adamw/mean", "gated/adamw/mean", "encoder_drop/sgd/pair"),
    "pipeline": ("gpt4/adamw/pair", "deep/sgd/mean", "encoder4/adamw/pair", "hooked/sgd/mean"),
}
LONG_ENOUGH = ("gpt8/adamw/pair", "deep8/sgd/mean", "encoder8/adamw/pair")
"""For two chunks on each of four ranks."""


def networks(split: Split) -> tuple[str, ...]:
    if split.size == 8:
        return ("mlp/adamw/mean",)
    is_long = split.schedule == "interleaved" and split.mesh == "pipeline=4"
    return LONG_ENOUGH if is_long else NETWORKS[split.strategy]


CASES = [
    (split, network)
    for split in [*TENSOR, *PIPELINE]
    for network in networks(split)
    # Two replicas, and micro-batches, draw other masks than one device; the ranks of one replica draw the same.
    if split.size < 4 or not network.startswith(("gated", "encoder_drop"))
]
QUICK = {
    ("tensor=2-1-1f1b", "encoder/adamw/pair"),
    ("fsdp=2-tensor=2-1-1f1b", "encoder/adamw/pair"),
    ("pipeline=2-3-1f1b", "gpt4/adamw/pair"),
    ("pipeline=2-3-1f1b", "hooked/sgd/mean"),
    ("pipeline=2-3-zero-bubble", "gpt4/adamw/pair"),
    ("pipeline=2-3-interleaved", "gpt4/adamw/pair"),
    ("pipeline=2-3-interleaved", "hooked/sgd/mean"),
}


def plan(split: Split) -> Plan:
    return Plan(
        strategy=split.strategy,
        devices=("cpu",) * split.size,
        mesh=split.mesh,
        pipeline_schedule=split.schedule,
        accumulate=split.accumulate,
        batch=BATCH,
        steps=STEPS,
        precision="fp64",
        clip=0.5,
        threads=1,
        audit=True,
    )


def name(split: Split, network: str) -> str:
    return f"{split.name}-{network}".replace("/", "-")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("split")
    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    of_this = [(one["split"], one["network"]) for one in params]
    wanted = dict.fromkeys([*((SINGLE, network) for _, network in of_this), *of_this])
    for size in (1, 2, 3, 4, 8):
        pairs = [pair for pair in wanted if pair[0].size == size]
        if pairs:
            run_jobs(folder, size, [(name(*pair), plan(pair[0]), pair[1]) for pair in pairs])
    return folder


def check_same(one: Result, other: Result) -> None:
    assert len(one.record.losses) == STEPS
    assert other.record.losses == pytest.approx(one.record.losses, rel=TOLERANCE)
    assert furthest(other.weights, one.weights) < TOLERANCE
    for ours, reference in zip(other.record.evaluations, one.record.evaluations, strict=True):
        assert ours.samples == NUM_VALID
        assert ours.values == pytest.approx(reference.values, rel=TOLERANCE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("split", "network"),
    [
        pytest.param(*case, id=name(*case), marks=() if (case[0].name, case[1]) in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_learns_the_same_as_single(trained: Path, split: Split, network: str) -> None:
    check_same(result(trained, name(SINGLE, network)), result(trained, name(split, network)))
