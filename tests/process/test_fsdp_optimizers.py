"""fsdp with parameters that have no rows to shard, and with optimizers that need whole ones: the training of single."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from evenstep.plan import Plan
from evenstep.training.trainer import perform
from tests.fleet import Result, bits_of, furthest, result, run_jobs
from tests.small_tasks import small_task

CUT, STEPS = 7, 15  # 11 steps are an epoch
QUICK = ["scales/adamw/pair", "scales/adafactor/mean", "gpt/muon_adamw/pair"]
SCALES = ["scales/adamw/mean/ema", "scales/sgd/mean", "scales/fused/pair", "scales/foreach/pair", "scales/plain/mean"]
WHOLE = ["mlp/muon/mean", "cnn/adafactor/pair", "mlp/rprop/mean", "mlp/hf_adafactor/mean", "heads/muon_adamw/pair"]
KEYS = [*QUICK, *SCALES, *WHOLE]
MORE: dict[str, dict[str, Any]] = {
    "": {},
    "accumulate": {"accumulate": 3},
    "virtual": {"virtual_replicas": 4},
    "bf16": {"precision": "bf16", "accumulate": 3},
    "fp16": {"precision": "fp16", "accumulate": 3},
}
pytestmark = pytest.mark.timeout(900)


class Job(NamedTuple):
    """One training; `source` is where the checkpoint was saved that it goes on with."""

    where: str
    key: str
    kind: str
    source: str = ""

    @property
    def name(self) -> str:
        return "_".join(self).replace("/", "-")

    @property
    def size(self) -> int:
        return int(self.where.partition("-")[2])

    def needs(self) -> list[Job]:
        return [self._replace(where=self.source, source="")] if self.source else []

    def plan(self, folder: Path) -> Plan:
        usual = {"batch": 10, "steps": STEPS, "precision": "fp64", "clip": 1.0, "checkpoint_every": CUT, "keep": 9}
        resume = [folder / one.name / "checkpoints" / f"step-{CUT:08d}" for one in self.needs()]
        return Plan(
            strategy=self.where.partition("-")[0],
            devices=("cpu",) * self.size,
            resume=str(resume[0]) if resume else None,
            threads=1,
            **{**usual, **MORE[self.kind]},
        )


def reference(job: Job) -> Job:
    """Which steps fp16's scaler skips depends on the number of devices."""
    return Job("single-1" if job.kind not in ("bf16", "fp16") else "ddp-2", job.key, job.kind)


WAYS = [("fsdp-2", "single-1"), ("single-1", "fsdp-2"), ("fsdp-2", "fsdp-3"), ("fsdp-3", "ddp-2"), ("ddp-2", "fsdp-2")]
JOBS = [
    *(Job("fsdp-2", key, "accumulate") for key in KEYS),
    *(Job("fsdp-3", key, kind) for key, kind in product(KEYS, ("", "virtual"))),
]
RESUMED = [
    *(Job(target, key, "accumulate", source) for key in QUICK for source, target in WAYS),
    *(Job("fsdp-3", key, "accumulate", "fsdp-2") for key in (*SCALES, *WHOLE)),
]


def is_quick(job: Job) -> bool:
    return job.key in QUICK and (job.where, job.source) in (("fsdp-2", ""), *(way[::-1] for way in WAYS[:2]))


def cases(jobs: list[Job]) -> list[Any]:
    return [pytest.param(job, id=job.name, marks=() if is_quick(job) else pytest.mark.slow) for job in jobs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("optimizers")
    of_this = [item.callspec.params["job"] for item in request.session.items if item.path == request.path]
    wanted = dict.fromkeys(one for job in of_this for one in (reference(job), *job.needs(), job))
    first = [job for job in wanted if not job.source]
    # What goes on with a checkpoint of one process is run with those of its own size.
    of_one = [job for job in wanted if job.source == "single-1"]
    rest = [job for job in wanted if job.source not in ("", "single-1")]
    for jobs in ([job for job in first if job.size == 1], [*(job for job in first if job.size > 1), *of_one], rest):
        for size in (1, 2, 3):
            _run(folder, size, [job for job in jobs if job.size == size])
    return folder


def _run(folder: Path, size: int, jobs: list[Job]) -> None:
    if size > 1 and jobs:
        run_jobs(folder, size, [(job.name, job.plan(folder), job.key) for job in jobs])
        return
    for job in jobs:
        (folder / job.name).mkdir()
        for _ in perform(job.plan(folder), small_task(job.key), folder / job.name):
            pass


def check(ours: Result, single: Result) -> None:
    assert ours.record.losses == pytest.approx(single.record.losses[-len(ours.record.losses) :], rel=1e-9)
    assert furthest(ours.weights, single.weights) < 1e-9


def shapes(run: Path) -> dict[str, Any]:
    """Of all tensors in the last checkpoint."""
    files = sorted((run / "checkpoints" / "latest").glob("*.safetensors"))
    return {f"{file.name}/{name}": one.shape for file in files for name, one in load_file(file).items()}


@pytest.mark.parametrize("job", cases(JOBS))
def test_it_trains_as_one_device_does(runs: Path, job: Job) -> None:
    check(result(runs, job.name), result(runs, reference(job).name))
    assert shapes(runs / job.name) == shapes(runs / reference(job).name)
    if job.kind == "virtual" and job.key in QUICK:
        assert bits_of(runs / job.name) == bits_of(runs / reference(job).name)


@pytest.mark.parametrize("job", cases(RESUMED))
def test_a_checkpoint_goes_on_elsewhere(runs: Path, job: Job) -> None:
    resumed = result(runs, job.name)
    assert len(resumed.record.losses) == STEPS - CUT
    check(resumed, result(runs, reference(job).name))


# Muon computes in bfloat16, whose rounding grows.
HALVES = [Job("fsdp-2", key, kind) for key in QUICK[:2] for kind in ("fp16", "bf16")]


@pytest.mark.parametrize("job", [pytest.param(job, id=job.name, marks=pytest.mark.slow) for job in HALVES])
def test_in_half_precision_it_trains_as_ddp_does(runs: Path, job: Job) -> None:
    ours, ddp = result(runs, job.name), result(runs, reference(job).name)
    # fsdp gathers the weights themselves in bfloat16.
    tolerance = 0.02 if job.kind == "bf16" else 1e-4
    assert ours.record.losses == pytest.approx(ddp.record.losses, rel=tolerance)
