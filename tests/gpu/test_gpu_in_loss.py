"""What a loss can call, on GPUs: the same result, or eager steps with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep import Record, Task
from tests.fleet import furthest, newest_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

x = torch.randn(330, 12, generator=torch.Generator().manual_seed(0))


def contrastive(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    one, other = evenstep.gather(model(batch[0])), evenstep.gather(model(batch[0] + 0.1))
    return F.cross_entropy(one @ other.T, torch.arange(len(one), device=one.device))


def gathering() -> Task:
    """Found by its name in the processes of ddp, for this one may have used CUDA."""
    return Task(
        model=lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8)),
        train=(x,),
        loss=contrastive,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch=16,
    )


def trained(strategy: str, devices: str, precision: str = "fp64", **given: Any) -> Record:
    options = {key: given.pop(key) for key in ("fast", "epochs", "name", "clip", "statistics") if key in given}
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8)),
        "train": (x,),
        "loss": contrastive,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "batch": 16,
    }
    task = Task(**{**usual, **given})
    choices: dict[str, Any] = {"strategy": strategy, "devices": devices, "precision": precision, "name": strategy}
    return evenstep.train(task, **{**choices, **options})


@pytest.mark.parametrize(
    ("strategy", "devices"), [("dp", "cuda:0,cpu"), ("dp", "cuda:0,cuda:0"), ("ddp", "cuda:0,cuda:0")]
)
def test_a_loss_that_gathers_equals_one_gpu(strategy: str, devices: str) -> None:
    one = evenstep.train(gathering, devices="cuda:0", precision="fp64", name="single")
    several = evenstep.train(gathering, strategy=strategy, devices=devices, precision="fp64", name=strategy)
    assert several.losses == pytest.approx(one.losses, rel=1e-9)
    assert furthest(newest_weights(Path("runs") / strategy), newest_weights(Path("runs/single"))) < 1e-9


def logging(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    loss = model(batch[0]).square().mean()
    evenstep.log({"twice": 2 * loss, "step": evenstep.progress().step})
    return loss


def test_a_loss_that_logs_is_computed_eagerly_and_the_run_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    record = trained("single", "cuda:0", "fp32", loss=logging)
    assert [step.logged["step"] for step in record.steps] == [step.step for step in record.steps]
    assert all(step.logged["twice"] == pytest.approx(2 * step.loss, rel=1e-5) for step in record.steps)
    assert "fast: steps stay eager: the loss calls evenstep.log, which a replay would not call again" in " ".join(
        capfd.readouterr().err.split()
    )


def unfreeze(run: Any) -> None:
    run.model[0].requires_grad_(True)


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
    model[0].requires_grad_(False)
    return model


def plain(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("fast", ["auto", "off"])
def test_replayed_steps_average_the_weights_and_follow_what_changes_between_them(fast: str) -> None:
    changes: dict[str, Any] = {"loss": plain, "model": half_frozen, "after": unfreeze, "after_every": 15, "ema": 0.9}
    devices = ("cpu", "cuda:0")
    tasks = [trained("single", device, "fp32", **changes, fast=fast, epochs=3, name=device[:3]) for device in devices]
    assert tasks[1].losses == pytest.approx(tasks[0].losses, rel=1e-3)
    ours, theirs = (load_file(f"runs/{name}/checkpoints/latest/ema.safetensors") for name in ("cud", "cpu"))
    assert furthest(ours, theirs) < 1e-3


def test_the_norm_of_gradients_is_recorded_by_replayed_steps_too(capfd: pytest.CaptureFixture[str]) -> None:
    names = {"auto": "replayed", "off": "eager"}
    one, other = (trained("single", "cuda:0", "fp32", loss=plain, clip=0.1, fast=f, name=n) for f, n in names.items())
    assert "replayed as a CUDA graph" in " ".join(capfd.readouterr().err.split())
    norms = [step.grad_norm or 0.0 for step in other.steps]
    assert [step.grad_norm for step in one.steps] == pytest.approx(norms, rel=1e-3)
    assert min(norms) > 0.0


def test_statistics_on_a_gpu_are_those_on_a_cpu() -> None:
    records = [trained("single", device, loss=plain, statistics=10, name=device[:3]) for device in ("cpu", "cuda:0")]
    ours, theirs = (record.statistics for record in records)
    assert [row.step for row in ours] == [10, 20]
    for one, other in zip(ours, theirs, strict=True):
        norms = [{name: values.norm for name, values in row.gradients.items()} for row in (one, other)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
