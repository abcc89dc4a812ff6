"""Checkpoints of loops that people write themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.errors import CheckpointError, TrainingError
from evenstep.worker.run import Run

x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(batch), batch[:, :2])


def new_run(seed: int = 0) -> Run:
    team = evenstep.join("single", devices=("cpu",), seed=seed)
    models = {name: team.spread(nn.Linear(6, 2)) for name in ("first", "second")}
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


def test_another_seed_is_refused_for_it_would_repeat_samples(tmp_path: Path) -> None:
    run = new_run()
    take_steps(run, 2)
    run.save(tmp_path)
    with pytest.raises(CheckpointError, match="seed 0 and the seed is now 1: going on would repeat"):
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
