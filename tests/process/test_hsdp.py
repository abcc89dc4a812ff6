"""HSDP (`--mesh data=2,fsdp=2`) learns what one device learns, by two copies of a model; and who may offload shards."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.errors import PlanError
from evenstep.plan import Plan
from evenstep.record import Record
from tests.fleet import bits_of, furthest, newest_weights, result, run_jobs, run_processes
from tests.marks import first_is_quick, num_steps
from tests.small_tasks import NUM_VALID

SCRIPT = Path(__file__).with_name("hsdp_script.py")
STEPS = num_steps(12, 30)
"""Into the second epoch; the last batch of each has 3 samples, so that a rank has none."""
TOLERANCE = 1e-9
pytestmark = pytest.mark.timeout(300)


def plan(strategy: str, size: int = 1, mesh: str | None = None, **more: object) -> Plan:
    fields = {"batch": 10, "steps": STEPS, "precision": "fp64", "clip": 0.5, "threads": 1, "audit": True}
    return Plan(strategy=strategy, devices=("cpu",) * size, mesh=mesh, **{**fields, "check_every": 4, **more})


CASES = [
    ("mlp/adamw/mean", "data=2,fsdp=2", 2),
    ("gpt/adamw/pair", "data=2,fsdp=2", 1),
    ("gpt/sgd/pair", "data=2", 2),
    ("cnn/adamw/mean", "fsdp=2", 2),
    ("cnn/sgd/pair", "data=2,fsdp=2", 1),
    ("mlp/sgd/pair", "data=4,fsdp=1", 1),
    ("mlp/sgd/pair", "data=1,fsdp=4", 1),
    ("scales/adamw/pair", "data=2,fsdp=2", 2),
    ("scales/adafactor/mean", "data=2,fsdp=2", 1),
    ("gpt/muon_adamw/pair", "data=2,fsdp=2", 2),
]


@pytest.mark.parametrize(("network", "mesh", "accumulate"), first_is_quick(CASES))
def test_learns_the_same_as_single(tmp_path: Path, network: str, mesh: str, accumulate: int) -> None:
    run_jobs(tmp_path, 1, [("single", plan("single"), network)])
    run_jobs(tmp_path, 4, [("hsdp", plan("fsdp", 4, mesh, accumulate=accumulate), network)])
    one, other = result(tmp_path, "single"), result(tmp_path, "hsdp")
    assert len(one.record.losses) == STEPS
    assert other.record.losses == pytest.approx(one.record.losses, rel=TOLERANCE)
    assert furthest(other.weights, one.weights) < TOLERANCE
    for ours, reference in zip(other.record.evaluations, one.record.evaluations, strict=True):
        assert ours.samples == NUM_VALID
        assert ours.values == pytest.approx(reference.values, rel=TOLERANCE)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("hsdp")
    run_processes(SCRIPT, [str(folder)], 4, folder / "logs")
    found: dict[str, object] = json.loads((folder / "seen.json").read_text())
    return found


def test_ranks_hold_half_of_the_model_and_the_first_copy_is_saved(seen: dict[str, object]) -> None:
    assert seen["rows"] == [[0, 3, True], [3, 2, True], [0, 3, False], [3, 2, False]]


def test_a_tensor_is_sharded_as_another_one(seen: dict[str, object]) -> None:
    assert seen["is_same"]


def test_a_copy_that_differs_is_found(seen: dict[str, object]) -> None:
    assert seen["equal"] == ""
    assert str(seen["drifted"]).startswith(
        "replicas differ: 0.weight on rank 3 is not that of rank 1, seen after step 7; they were still equal at step 7"
    )


@pytest.mark.slow
def test_a_run_goes_on_under_other_strategies_and_sizes(tmp_path: Path) -> None:
    key, mesh = "tied/adamw/mean", "data=2,fsdp=2"

    def saved(name: str, step: int) -> str:
        return str(tmp_path / name / "checkpoints" / f"step-{step:08d}")

    def going_on(strategy: str, size: int, mesh: str | None, resume: str | None) -> Plan:
        return replace(plan(strategy, size, mesh, checkpoint_every=2, keep=9), resume=resume, steps=9)

    run_jobs(tmp_path, 1, [("single", going_on("single", 1, None, None), key)])
    run_jobs(tmp_path, 3, [("fsdp", going_on("fsdp", 3, None, saved("single", 2)), key)])
    run_jobs(tmp_path, 4, [("hsdp", going_on("fsdp", 4, mesh, saved("fsdp", 4)), key)])
    run_jobs(tmp_path, 2, [("ddp", going_on("ddp", 2, None, saved("hsdp", 6)), key)])
    reference = newest_weights(tmp_path / "single")
    for name in ("fsdp", "hsdp", "ddp"):
        assert furthest(newest_weights(tmp_path / name), reference) < TOLERANCE, name
        assert bits_of(tmp_path / name).keys() == bits_of(tmp_path / "single").keys()


@pytest.mark.slow
def test_virtual_replicas_have_the_bits_of_one_device(tmp_path: Path) -> None:
    fields = {"virtual_replicas": 6, "batch": 12, "precision": "fp32"}
    run_jobs(tmp_path, 1, [("single", plan("single", **fields), "mlp/adamw/mean")])
    run_jobs(tmp_path, 4, [("hsdp", plan("fsdp", 4, "data=2,fsdp=2", **fields), "mlp/adamw/mean")])
    assert bits_of(tmp_path / "hsdp") == bits_of(tmp_path / "single")


@pytest.mark.slow
def test_statistics_count_each_shard_once(tmp_path: Path) -> None:
    run_jobs(tmp_path, 1, [("single", plan("single", statistics=4), "mlp/adamw/mean")])
    run_jobs(tmp_path, 4, [("hsdp", plan("fsdp", 4, "data=2,fsdp=2", statistics=4), "mlp/adamw/mean")])
    one, other = (Record.read(tmp_path / name).statistics[0] for name in ("single", "hsdp"))
    for ours, reference in ((other.parameters, one.parameters), (other.gradients, one.gradients)):
        norms = {name: value.norm for name, value in reference.items()}
        assert {name: value.norm for name, value in ours.items()} == pytest.approx(norms, rel=1e-6)


TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task


def task():
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))
    y = (x.sum(1) > 0).long()
    return Task(
        model=lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)),
        train=(x[:64], y[:64]), valid=(x[64:], y[64:]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01), batch=16, clip=0.1,
    )
"""


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("more", [("verify", "--steps", "3"), ("compare", "--steps", "4", "--rounds", "1")])
def test_verify_and_compare_take_a_mesh(more: tuple[str, ...]) -> None:
    Path("my_task.py").write_text(TASK)
    where = ["my_task.py", "--strategies", "fsdp", "--devices", "4", "--mesh", "data=2,fsdp=2"]
    command = [sys.executable, "-m", "evenstep", more[0], *where, *more[1:]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "fsdp x 4, data=2,fsdp=2" in ended.stdout + ended.stderr
    assert ("all strategies match single" if more[0] == "verify" else "✓ same") in ended.stdout + ended.stderr


def test_a_loop_that_cannot_offload_is_refused_before_it_joins() -> None:
    for given, message in {
        ("fsdp", "fp32"): "where those of CPU devices are already; leave it out",
        ("ddp", "fp32"): "ddp offloads none; use --strategy fsdp",
    }.items():
        with pytest.raises(PlanError, match=message):
            evenstep.join(given[0], devices=("cpu",), precision=given[1], cpu_offload=True)


@pytest.mark.slow
def test_offloading_is_dropped_where_there_is_nothing_to_offload() -> None:
    Path("my_task.py").write_text(TASK)
    values = plan("fsdp").to_json() | {"task": "my_task.py", "devices": ["cuda:0"], "cpu_offload": True, "steps": 2}
    Path("plan.json").write_text(json.dumps(values))
    command = [sys.executable, "-m", "evenstep", "train", "--plan", "plan.json", "--strategy", "fsdp"]
    ended = subprocess.run([*command, "--devices", "cpu"], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "--cpu-offload needs shards on GPUs, and this run has none; ignoring it" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_offloaded_shards_are_clipped_updated_saved_and_loaded(tmp_path: Path, size: int) -> None:
    script = Path(__file__).with_name("offload_script.py")
    run_processes(script, [str(tmp_path), "single"], 1, tmp_path / "single-logs")
    run_processes(script, [str(tmp_path), "fsdp"], size, tmp_path / "logs")
    single, offloaded = (torch.load(tmp_path / name) for name in ("single-1.pt", f"fsdp-{size}.pt"))
    assert furthest(offloaded, single) < TOLERANCE
