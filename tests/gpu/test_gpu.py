"""On one card: every strategy learns what single learns, and dp what nn.DataParallel learns.

Run where there is a card: python -m pytest -m gpu tests/gpu
`dp` uses the card twice; `ddp` with two ranks on one card speaks gloo; NCCL runs at size 1.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from evenstep.plan import Plan
from evenstep.strategies.dp import Replicas
from tests.fleet import furthest, result, run_jobs
from tests.small_tasks import BUILDERS, DATA, mean_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    # nn.DataParallel's threads say this of themselves.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
]

STEPS = 30
WORLDS = {1: ["single-1", "dp-2", "ddp-1", "fsdp-1"], 2: ["ddp-2"]}
WHERES = [where for wheres in WORLDS.values() for where in wheres if where != "single-1"]
KEYS = ["mlp/adamw/pair", "cnn/sgd/mean", "gpt/adamw/mean"]
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 3e-2, "bf16": 3e-2, "fp16": 0.1}  # fp16 may skip another first step


def plan(where: str, precision: str) -> Plan:
    strategy, _, num = where.partition("-")
    devices = ("cuda:0",) * int(num)
    return Plan(
        strategy=strategy,
        devices=devices,
        batch=10,
        steps=STEPS,
        accumulate=3,
        precision=precision,
        clip=1.0,
        threads=1,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    for size, wheres in WORLDS.items():
        jobs = [(f"{w}/{p}/{key.split('/')[0]}", plan(w, p), key) for w in wheres for p in TOLERANCE for key in KEYS]
        run_jobs(folder, size, jobs)
    cut = folder / "dp-2/fp64/mlp/checkpoints"
    latest = sorted(cut.glob("step-*"))[0]
    on = [
        (f"single-1/on/{w}", replace(plan("single-1", "fp64"), resume=str(latest)), "mlp/adamw/pair") for w in ["dp-2"]
    ]
    run_jobs(folder, 1, on)
    return folder


@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt"])
def test_learns_the_same_as_single(runs: Path, where: str, precision: str, model: str) -> None:
    tolerance = TOLERANCE[precision]
    single, other = (result(runs, f"{place}/{precision}/{model}") for place in ("single-1", where))
    assert len(single.record.losses) == STEPS
    assert other.record.losses == pytest.approx(single.record.losses, rel=tolerance)
    if precision in ("fp64", "fp32"):
        assert furthest(other.weights, single.weights) < tolerance


def test_the_gpus_memory_is_recorded(runs: Path) -> None:
    summary = result(runs, "dp-2/fp32/mlp").record.summary
    assert summary is not None
    assert list(summary.peak_bytes) == ["rank0 cuda:0"]
    assert 0 < summary.peak_bytes["rank0 cuda:0"] < 2**30


def test_a_checkpoint_of_dp_goes_on_under_single(runs: Path) -> None:
    on = result(runs, "single-1/on/dp-2").record
    whole = result(runs, "single-1/fp64/mlp").record
    assert on.losses == pytest.approx(whole.losses[-len(on.losses) :], rel=1e-9)


@pytest.mark.parametrize("model", ["cnn", "norm"])
def test_dp_gives_the_losses_and_weights_of_nn_data_parallel(model: str) -> None:
    torch.manual_seed(0)
    reference = BUILDERS[model]().cuda()
    team = evenstep.join("dp", devices=("cuda:0", "cuda:0"))
    ours = team.wrap(copy.deepcopy(reference))
    parallel = nn.DataParallel(reference, device_ids=[0, 0])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, parallel)]
    loader = team.loader(DATA[model](120, torch.Generator().manual_seed(1)), batch=20)
    for _ in range(4):
        for batch in loader:
            (per_replica,) = batch.micro_batches
            x, y = (torch.cat([micro_batch.data[i] for micro_batch in per_replica]) for i in range(2))
            expected = mean_loss(parallel, (x, y))
            expected.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            assert team.backward(mean_loss, ours, batch) == pytest.approx(expected.item(), rel=1e-4)
            team.step(optimizers[0])
    mine, theirs = (dict(m.named_parameters()) for m in (ours.module, reference))
    assert furthest(mine, theirs) < 1e-4


def test_the_statistics_of_batchnorm_under_dp_are_those_of_device_0() -> None:
    """What nn.DataParallel does on two cards (on one card listed twice its replicas share their buffers)."""
    team = evenstep.join("dp", devices=("cuda:0", "cuda:0"))
    norm = nn.BatchNorm1d(20)
    ours, expected = team.wrap(nn.Sequential(norm, nn.Linear(20, 5))), copy.deepcopy(norm).cuda()
    for batch in team.loader(DATA["mlp"](120, torch.Generator().manual_seed(1)), batch=20):
        team.backward(mean_loss, ours, batch)
        expected(batch.micro_batches[0][0].data[0])
    mine = ours.module[0]
    assert int(mine.num_batches_tracked) == int(expected.num_batches_tracked) == 6
    torch.testing.assert_close(mine.running_mean, expected.running_mean)
    torch.testing.assert_close(mine.running_var, expected.running_var)


def test_dp_copies_between_different_devices() -> None:
    """The card and the CPU together: the way parameters and gradients travel between two cards."""
    torch.manual_seed(0)
    model = BUILDERS["norm"]().double()
    alone, apart = evenstep.join("single", ("cpu",), "fp64"), evenstep.join("dp", ("cuda:0", "cpu"), "fp64")
    data = DATA["mlp"](60, torch.Generator().manual_seed(1))
    # No BatchNorm in what is compared: its statistics are each device's own.
    model[1] = nn.Identity()
    spreads = [alone.wrap(copy.deepcopy(model)), apart.wrap(copy.deepcopy(model))]
    assert isinstance(spreads[1], Replicas)
    assert {weight.device.type for weight in spreads[1].parameters()} == {"cpu", "cuda"}
    losses = []
    for team, spread in zip((alone, apart), spreads, strict=True):
        optimizer = torch.optim.AdamW(spread.parameters(), lr=1e-2)
        loader = team.loader(data, batch=10)
        for batch in loader:
            losses.append(team.backward(mean_loss, spread, batch))
            team.step(optimizer, clip=1.0)
    assert losses[6:] == pytest.approx(losses[:6], rel=1e-9)


def test_memory_is_even_between_the_devices_of_dp() -> None:
    """Parameters to update, and so optimizer state, are dealt out by size."""
    team = evenstep.join("dp", devices=("cuda:0", "cpu"))
    spread = team.wrap(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    held = {"cuda": 0, "cpu": 0}
    for weight in spread.parameters():
        held[weight.device.type] += weight.numel()
    assert held["cuda"] == pytest.approx(held["cpu"], rel=0.02)


def test_the_step_does_not_wait_for_the_gpu_beyond_the_loss() -> None:
    """torch reports every call that makes the host wait; one training step has none but the wait for its own loss."""
    team = evenstep.join("single", ("cuda:0",))
    model = team.wrap(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = DATA["mlp"](64, torch.Generator().manual_seed(1))
    loader = team.loader((x.cuda(), y.cuda()), batch=16)
    for batch in loader:
        team.backward(mean_loss, model, batch)
        team.step(optimizer)
    batches = list(loader)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            team.backward(mean_loss, model, batch)
            team.step(optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(batches) == 4


@pytest.mark.parametrize("where", ["single-1", "dp-2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scores_of_predictions_on_the_gpu_are_those_of_the_cpu(where: str, precision: str) -> None:
    strategy, _, num = where.partition("-")
    x, y = DATA["mlp"](101, torch.Generator().manual_seed(0))
    task = evenstep.Task(
        model=BUILDERS["mlp"],
        train=(x, y),
        valid=(x, y),
        loss=mean_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        predict=lambda model, batch: ({"logits": model(batch[0]), "x": batch[0]}, batch[1]),
        scores={
            "median": lambda predictions, targets: predictions["logits"].median(),
            "in_order": lambda predictions, targets: float(predictions["x"].equal(x) and targets.equal(y)),
        },
        batch=16,
    )
    devices = ("cuda:0",) * int(num)
    record = evenstep.train(task, strategy=strategy, devices=devices, precision=precision, steps=1, evaluate_every=1)
    expected = evenstep.train(task, devices=("cpu",), steps=1)
    values = record.evaluations[-1].values
    assert values["in_order"] == 1.0
    tolerance = 1e-4 if precision == "fp32" else 0.05
    assert values["median"] == pytest.approx(expected.evaluations[-1].values["median"], abs=tolerance)
