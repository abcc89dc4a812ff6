"""Checkpoints of loops that people write themselves."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.errors import CheckpointError, NonFiniteLoss, PlanError, TaskError, TrainingError
from evenstep.training.checkpointed_run import Run

x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(batch), batch[:, :2])


def new_run(seed: int = 0) -> Run:
    team = evenstep.join("single", devices=("cpu",), seed=seed)
    models = {name: team.wrap(nn.Linear(6, 2)) for name in ("first", "second")}
    optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
    return Run(team, models, optimizers, team.loader(x, batch=10))


def take_steps(run: Run, num: int) -> list[float]:
    losses = []
    while len(losses) < num:
        for batch in run.loader:
            for name, model in run.models.items():
                losses.append(run.team.backward(loss, model, batch))
                run.team.step(run.optimizers[name])
            if len(losses) >= num:
                break
    return losses


def test_two_models_and_optimizers_go_on_from_the_middle_of_an_epoch(tmp_path: Path) -> None:
    run = new_run()
    take_steps(run, 6)
    path = run.save(tmp_path / "mine")
    assert path.name == "step-00000003"
    rest = take_steps(run, 8)
    again = new_run()
    again.load(tmp_path / "mine")
    assert again.step == 3
    assert again.loader.position == 30
    assert take_steps(again, 8) == rest


def test_what_a_loop_adds_to_a_checkpoint_comes_back(tmp_path: Path) -> None:
    run = new_run()
    take_steps(run, 2)
    replay = torch.arange(12.0).view(3, 4).t()
    run.save(tmp_path, replay={"states": replay, "parts": [replay[0], 3]}, temperature=0.25, note=None)
    loaded = new_run().load(tmp_path)
    assert set(loaded) == {"replay", "temperature", "note"}
    assert (loaded["temperature"], loaded["note"], loaded["replay"]["parts"][1]) == (0.25, None, 3)
    assert torch.equal(loaded["replay"]["states"], replay)
    assert torch.equal(loaded["replay"]["parts"][0], replay[0])


def test_another_seed_is_refused_for_it_would_repeat_samples(tmp_path: Path) -> None:
    run = new_run()
    take_steps(run, 2)
    run.save(tmp_path)
    with pytest.raises(CheckpointError, match="seed 0 and the seed is now 1: resuming would repeat"):
        new_run(seed=1).load(tmp_path)


def test_weights_that_are_not_finite_are_not_saved_over_good_ones(tmp_path: Path) -> None:
    run = new_run()
    take_steps(run, 2)
    good = run.save(tmp_path)
    take_steps(run, 2)
    with torch.no_grad():
        run.models["second"].module.bias[0] = float("nan")
    with pytest.raises(TrainingError, match=r"second\.bias holds NaN or infinity"):
        run.save(tmp_path)
    assert (tmp_path / "latest").resolve() == good.resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", good.name]


def test_a_mask_of_minus_infinity_is_no_reason_not_to_save(tmp_path: Path) -> None:
    team = evenstep.join("single", devices=("cpu",))
    net = nn.Linear(6, 2)
    net.register_buffer("mask", torch.full((2, 2), float("-inf")))
    model = team.wrap(net)
    run = Run(team, model, torch.optim.SGD(model.parameters(), lr=0.1), team.loader(x, batch=10))
    assert (run.save(tmp_path) / "weights.safetensors").is_file()


def test_what_a_plain_loop_does_with_losses_and_batches() -> None:
    team = evenstep.join("single", devices=("cpu",))
    model = team.wrap(nn.Linear(6, 2))
    loader = team.loader(DataLoader(TensorDataset(x), batch_size=10))
    batch = next(iter(loader))
    assert batch.num_samples == 10
    mean = team.backward(lambda model, batch: loss(model, batch[0]), model, batch)
    assert mean.item() == mean
    assert pickle.loads(pickle.dumps(mean)).count == copy.copy(mean).count == 10
    (plain,) = batch
    assert torch.equal(plain, x[batch.ids])
    with pytest.raises(TaskError, match=r"team\.loader\(data, batch=64\)"):
        team.loader(TensorDataset(x))


def test_a_schedule_that_would_not_be_saved_is_warned_of(tmp_path: Path) -> None:
    team = evenstep.join("single", devices=("cpu",))
    model = team.wrap(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = team.loader(x, batch=10)
    with pytest.warns(UserWarning, match=r"write Run\(team, model, optimizer, loader, scheduler\)"):
        Run(team, model, optimizer, loader)
    Run(team, model, optimizer, loader, scheduler)


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    team = evenstep.join("dp", devices=("cpu", "cpu"))
    net = nn.Linear(6, 2)
    before = torch.optim.SGD(net.parameters(), lr=0.1)
    model = team.wrap(net)
    batch = next(iter(team.loader(x, batch=10)))
    team.backward(loss, model, batch)
    with pytest.raises(TaskError, match=r"make it after team\.wrap"):
        team.step(before)


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_three_backwards_before_a_step_add_up_for_means_and_for_pairs(strategy: str) -> None:
    def pair(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return loss(model, batch) * len(batch) * 3, len(batch) * 3

    weights = []
    for function in (loss, pair):
        team = evenstep.join(strategy, devices=("cpu",) * (2 if strategy == "dp" else 1), precision="fp64")
        torch.manual_seed(0)
        model = team.wrap(nn.Linear(6, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        three = list(team.loader(x, batch=10))[:3]
        for batch in three:
            team.backward(function, model, batch)
        team.step(optimizer)
        weights.append(model.module.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=0)
    torch.manual_seed(0)
    by_hand = nn.Linear(6, 2).double()
    for batch in three:
        loss(by_hand, torch.cat([micro_batch.data for micro_batch in batch.micro_batches[0]])).backward()
    torch.testing.assert_close(weights[0], (by_hand.weight - 0.1 * by_hand.weight.grad).detach(), rtol=1e-12, atol=0)


def test_measuring_sees_every_sample_and_does_not_move_the_training() -> None:
    run = new_run()
    take_steps(run, 2)
    model = run.models["first"]
    measured = run.team.evaluate(lambda model, batch: {"first": batch[:, 0]}, model, run.loader)
    assert measured["first"] == pytest.approx(float(x[:, 0].double().mean()), rel=1e-12)
    assert (run.step, run.loader.position) == (1, 10)


def test_a_non_finite_loss_leaves_no_gradients_behind() -> None:
    run = new_run()
    model = run.models["first"]
    batch = next(iter(run.loader))
    with pytest.raises(NonFiniteLoss, match="the loss is nan at step 1"):
        run.team.backward(lambda model, batch: loss(model, batch) * float("nan"), model, batch)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_loader_refuses_a_batch_of_nothing() -> None:
    with pytest.raises(PlanError, match="batch is 0"):
        evenstep.join("single", devices=("cpu",)).loader(x, batch=0)
