"""What the loop promises beyond plain parity: precision, randomness, BatchNorm, shared weights, few collectives."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from evenstep.plan import Plan
from tests.fleet import furthest, result, run_jobs, run_processes
from tests.marks import num_steps

STEPS = num_steps(14, 24)
WORLDS = {1: ["single-1", "dp-2"], 2: ["ddp-2", "fsdp-2"], 3: ["ddp-3"]}
OUTSIDE = ["averaged/adamw/mean", "weight_norm/adamw/mean", "mlp/sgd/decayed"]
"""Models and losses that compute with a layer's parameters outside of its forward."""
THREE = pytest.param("ddp-3", marks=pytest.mark.slow)
SHARDED = pytest.param("fsdp-2", marks=pytest.mark.slow)
MANY = ["dp-2", "ddp-2", "fsdp-2", THREE]


def plan(where: str, **more: object) -> Plan:
    strategy, _, num = where.partition("-")
    values = {"batch": 12, "steps": STEPS, "precision": "fp64", "threads": 1, **more}
    return Plan(strategy=strategy, devices=("cpu",) * int(num), **values)


def jobs_for(where: str, is_whole: bool) -> list[tuple[str, Plan, str]]:
    halves = ("bf16", "fp16") if is_whole or where != "fsdp-2" else ("fp16",)
    jobs = [(f"{where}/{half}", plan(where, precision=half), "mlp/adamw/mean") for half in halves]
    jobs.append((f"{where}/tied", plan(where), "tied/adamw/mean"))
    if is_whole or where != "fsdp-2":
        jobs.append((f"{where}/norm", plan(where), "norm/adamw/mean"))
    if not where.startswith("ddp"):
        jobs.append((f"{where}/later", plan(where), "later/sgd/mean"))
    jobs += [(f"{where}/{kind.partition('/')[0]}", plan(where), kind) for kind in OUTSIDE]
    if where.startswith(("ddp", "fsdp") if is_whole else "ddp"):
        jobs.append((f"{where}/sync", plan(where, sync_batchnorm=True), "norm/adamw/mean"))
    if where in ("single-1", "ddp-3"):
        # The last step of an epoch holds 2 samples: one of three ranks has none, and runs a sample that stands in.
        few = plan(where, batch=101, steps=4, sync_batchnorm=where == "ddp-3")
        jobs.append((f"{where}/few", few, "norm/adamw/mean"))
    if where in ("single-1", "ddp-2"):
        jobs.append((f"{where}/drop", plan(where, checkpoint_every=10, keep=9), "drop/adamw/mean"))
        cut = str(Path("checkpoints", "step-00000010"))
        jobs.append((f"{where}/drop-on", plan(where, resume=f"FOLDER/{where}/drop/{cut}"), "drop/adamw/mean"))
    return jobs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("training")
    is_whole = any(item.get_closest_marker("slow") for item in request.session.items)
    for size, wheres in WORLDS.items():
        if size == 3 and not is_whole:
            continue
        jobs = [(name, _in(folder, p), key) for where in wheres for name, p, key in jobs_for(where, is_whole)]
        run_jobs(folder, size, jobs)
    return folder


def _in(folder: Path, plan: Plan) -> Plan:
    return Plan.from_json({**plan.to_json(), "resume": plan.resume and plan.resume.replace("FOLDER", str(folder))})


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        *product(["dp-2", "ddp-2"], ["bf16", "fp16"]),
        ("fsdp-2", "fp16"),
        # test_fsdp_precision.py has another network in it.
        pytest.param("fsdp-2", "bf16", marks=pytest.mark.slow),
        *(pytest.param("ddp-3", kind, marks=pytest.mark.slow) for kind in ("bf16", "fp16")),
    ],
)
def test_half_precision_learns_what_single_does_within_its_rounding(runs: Path, where: str, kind: str) -> None:
    single, other = result(runs, f"single-1/{kind}").record, result(runs, f"{where}/{kind}").record
    assert other.losses == pytest.approx(single.losses, rel=0.02)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_all_ranks_skip_a_step_that_overflows_on_one(tmp_path: Path, strategy: str) -> None:
    first, second = run_script("skip_script.py", tmp_path, strategy)
    assert first == second
    assert False in first["taken"]
    assert True in first["taken"]


def run_script(name: str, folder: Path, *arguments: str) -> Any:
    """What a script beside this file wrote, run as two ranks by evenstep's launcher."""
    out = folder / "out.json"
    run_processes(Path(__file__).with_name(name), [*arguments, str(out)], 2, folder / "logs")
    return json.loads(out.read_text())


@pytest.mark.parametrize("where", MANY)
def test_shared_weights_and_calls_beside_forward_train_alike(runs: Path, where: str) -> None:
    single, other = result(runs, "single-1/tied"), result(runs, f"{where}/tied")
    assert other.record.losses == pytest.approx(single.record.losses, rel=1e-9)
    assert furthest(other.weights, single.weights) < 1e-9
    assert (other.weights["layers.0.weight"] == other.weights["layers.1.weight"]).all()


@pytest.mark.parametrize("where", ["dp-2", "fsdp-2"])
def test_a_head_may_be_used_from_some_step_on(runs: Path, where: str) -> None:
    single, other = result(runs, "single-1/later"), result(runs, f"{where}/later")
    assert other.record.losses == pytest.approx(single.record.losses, rel=1e-9)


@pytest.mark.parametrize("where", MANY)
@pytest.mark.parametrize("kind", OUTSIDE)
def test_parameters_used_outside_of_their_layer_are_whole(runs: Path, where: str, kind: str) -> None:
    name = kind.partition("/")[0]
    single, other = result(runs, f"single-1/{name}"), result(runs, f"{where}/{name}")
    assert other.record.losses == pytest.approx(single.record.losses, rel=1e-9)
    assert furthest(other.weights, single.weights) < 1e-9


@pytest.mark.parametrize("where", ["ddp-2", SHARDED, THREE])
def test_synchronised_batchnorm_sees_the_whole_batch(runs: Path, where: str) -> None:
    single, local, synced = (result(runs, name) for name in ("single-1/norm", f"{where}/norm", f"{where}/sync"))
    assert synced.record.losses == pytest.approx(single.record.losses, rel=1e-9)
    assert furthest(synced.weights, single.weights) < 1e-9
    assert local.record.losses != pytest.approx(single.record.losses, rel=1e-3)


@pytest.mark.slow
def test_synchronised_batchnorm_does_not_see_a_sample_that_stands_in_for_none(runs: Path) -> None:
    single, synced = result(runs, "single-1/few"), result(runs, "ddp-3/few")
    assert [step.samples for step in synced.record.steps] == [101, 2, 101, 2]
    assert synced.record.losses == pytest.approx(single.record.losses, rel=1e-9)
    assert furthest(synced.weights, single.weights) < 1e-9


@pytest.mark.parametrize("where", ["single-1", "ddp-2"])
def test_dropout_goes_on_after_a_restart_bit_for_bit(runs: Path, where: str) -> None:
    undisturbed, resumed = result(runs, f"{where}/drop"), result(runs, f"{where}/drop-on")
    assert resumed.record.losses == undisturbed.record.losses[10:]
    assert all((resumed.weights[name] == value).all() for name, value in undisturbed.weights.items())


def test_dropout_draws_another_mask_on_every_rank_and_in_every_backward(runs: Path, tmp_path: Path) -> None:
    first, second = run_script("dropout_script.py", tmp_path)
    assert len(first) == len(second) == 4
    assert len({*first, *second}) == 8
    assert run_script("dropout_script.py", tmp_path) == [first, second]
    assert result(runs, "ddp-2/drop").record.losses != result(runs, "single-1/drop").record.losses


def test_every_rank_evaluates_the_model_that_is_saved(tmp_path: Path) -> None:
    """Batch statistics differ between ranks while training; an evaluation uses those of rank 0 everywhere."""
    first, second = run_script("evaluation_script.py", tmp_path)
    assert first["while_training"] != second["while_training"]
    assert first["statistics"] == second["statistics"] == first["while_training"]
    assert first["modes"] == second["modes"] == [True, False]
    assert first["named"] == second["named"] == {"kind 0": 5.0, "kind 1": 6.0}
    assert first["shown"] != second["shown"]
    assert first["of the teacher"] == second["of the teacher"] == first["shown"]


def test_one_small_and_one_gradient_collective_per_step_under_accumulation(tmp_path: Path) -> None:
    counts = run_script("count_collectives.py", tmp_path)
    # The letters carry the loss; in the first two steps the ranks compare what they read.
    expected = {"steps": 9, "micro_batches": 27, "averages": 9, "letters": 9, "other_collectives": 4}
    assert counts == expected
    # torch's DDP sends gradients itself; that no rank lacks one takes no message.
    assert run_script("count_collectives.py", tmp_path, "complex") == {**expected, "averages": 0}
