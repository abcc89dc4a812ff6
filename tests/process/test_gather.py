"""Losses over the whole batch: with `evenstep.gather`, every strategy trains what one device trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep import Record, Task
from evenstep.errors import EvenstepError
from evenstep.training import loss_context
from tests.fleet import furthest, newest_weights

x = torch.randn(53, 12, generator=torch.Generator().manual_seed(0))
EACH = [
    pytest.param("ddp", 3, id="ddp"),
    pytest.param("dp", 3, id="dp"),
    pytest.param("fsdp", 2, id="fsdp", marks=pytest.mark.slow),
]


class Encoder(nn.Module):
    """Two towers and a temperature, which is used after the gather."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
        self.other = nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.one(x), dim=1), F.normalize(self.other(x), dim=1)


def simclr(model: Encoder, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    views = torch.cat([evenstep.gather(one), evenstep.gather(other)])
    scores = model.scale * views @ views.T - 1e9 * torch.eye(len(views))
    return F.cross_entropy(scores, torch.arange(len(views)).roll(len(views) // 2))


def clip(model: Encoder, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    scores = model.scale * evenstep.gather(one) @ evenstep.gather(other).T
    labels = torch.arange(len(scores))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def penalized(model: Encoder, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A pair (sum, count), with a term that does not go through the gather and one that needs a second derivative."""
    rows = evenstep.gather(one * other)
    (slope,) = torch.autograd.grad(rows.square().sum(), rows, create_graph=True)
    return len(one) * (rows.std() + slope.square().mean() + model.scale.square()) + other.square().sum(), len(one)


LOSSES = {"simclr": simclr, "clip": clip, "penalized": penalized}


def task(kind: str, **changes: Any) -> Task:
    def loss(model: Encoder, batch: tuple[torch.Tensor]) -> Any:
        return LOSSES[kind](model, *model(batch[0]))

    usual: dict[str, Any] = {
        "model": Encoder,
        # The last batch has one sample: two of three devices have none.
        "train": (x[:33],),
        "valid": (x[33:],),
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "metrics": lambda model, batch: {"mean": evenstep.gather(model(batch[0])[0]).mean()},
        "batch": 16,
        "epochs": 2,
    }
    return Task(**{**usual, **changes})


def trained(made: Task, strategy: str, num: int, **choices: Any) -> Record:
    devices = ",".join(["cpu"] * num)
    return evenstep.train(
        made, strategy=strategy, devices=devices, precision="fp64", name=strategy, progress=False, **choices
    )


@pytest.mark.parametrize(("strategy", "num"), EACH)
@pytest.mark.parametrize("kind", LOSSES)
def test_every_strategy_equals_one_device(kind: str, strategy: str, num: int) -> None:
    one, several = trained(task(kind), "single", 1), trained(task(kind), strategy, num)
    assert several.losses == pytest.approx(one.losses, rel=1e-9)
    for ours, theirs in zip(several.evaluations, one.evaluations, strict=True):
        assert ours.values == pytest.approx(theirs.values, rel=1e-9)
    assert furthest(newest_weights(Path("runs") / strategy), newest_weights(Path("runs/single"))) < 1e-9


@pytest.mark.parametrize("kind", LOSSES)
def test_replicas_of_one_gpu_send_gradients_back_after_backward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on the CPU, where they need not: the arithmetic is the same."""
    monkeypatch.setattr(loss_context, "shares_gpu", lambda world: True)
    test_every_strategy_equals_one_device(kind, "dp", 3)


def test_on_one_device_and_outside_of_a_training_it_returns_its_argument() -> None:
    assert evenstep.gather(x) is x


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_accumulation_is_refused(strategy: str) -> None:
    with pytest.raises(EvenstepError, match="needs the whole batch at once, and --accumulate splits it into 2"):
        trained(task("clip"), strategy, 1 if strategy == "single" else 2, accumulate=2)


def test_rows_that_are_not_samples_are_refused() -> None:
    def loss(model: Encoder, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return evenstep.gather(torch.cat(model(batch[0]))).square().mean()

    with pytest.raises(EvenstepError, match=r"one row for each sample: there are 16 on this device, .* \(32, 8\)"):
        trained(task("clip", loss=loss), "single", 1)


def failing(model: Encoder, batch: tuple[torch.Tensor]) -> torch.Tensor:
    if (batch[0] == x[0]).all(1).any():
        raise ValueError("sample 0 is spoilt")
    return evenstep.gather(model(batch[0])[0]).square().mean()


def failing_in_backward(model: Encoder, batch: tuple[torch.Tensor]) -> torch.Tensor:
    rows = evenstep.gather(model(batch[0])[0])
    if (batch[0] == x[0]).all(1).any():
        rows.register_hook(lambda _: 1 / 0)
    return rows.square().mean()


def skipping(model: Encoder, batch: tuple[torch.Tensor]) -> torch.Tensor:
    rows = model(batch[0])[0]
    return (rows if (batch[0] == x[0]).all(1).any() else evenstep.gather(rows)).square().mean()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (failing, "sample 0 is spoilt"),
        (failing_in_backward, "division by zero"),
        (skipping, "waits in evenstep.gather, and replica . did not call it"),
    ],
)
def test_a_replica_that_does_not_come_releases_the_others(loss: Any, words: str) -> None:
    with pytest.raises(Exception, match=words):
        trained(task("clip", loss=loss), "dp", 3)
