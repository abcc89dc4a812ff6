"""Optimizers as tasks write them, under every strategy against one device: by parameter names, and several at once."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.record import Record
from tests.fleet import furthest, newest_weights
from tests.marks import first_is_quick

NAMED = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(60, 6)

def net():
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))

def by_layer(net: nn.Module):
    assert [name for name, _ in net.named_parameters()][:3] == ["0.weight", "0.bias", "1.weight"]
    return torch.optim.AdamW(
        {
            "params": [weight],
            "lr": 1e-2 * 0.5 ** (3 - int(name[0])),
            "weight_decay": 0.3 if name.endswith("weight") and weight.ndim > 1 else 0.0,
        }
        for name, weight in net.named_parameters()
    )

def task() -> Task:
    return Task(
        model=net,
        train=(x, (x[:, 0] > 0).long()),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=by_layer,
        scheduler=lambda optimizer, num_steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps),
        batch=9,
    )

def closed() -> Task:
    return Task(model=net, train=task().train, loss=task().loss, optimizer=lambda model: torch.optim.LBFGS(
        model.parameters()), batch=9)
"""
STRATEGIES = ["ddp", pytest.param("dp", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.slow)]


def run(*arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "evenstep", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_equal_to_single(file: str, strategy: str, *more: str) -> None:
    """The same losses and weights after an epoch and a half; and a resume, into the other of the two."""
    where = {"single": (), "two": ("--strategy", strategy, "--devices", "cpu,cpu")}
    for name, how in where.items():
        run("train", file, *how, "--steps", "11", "--name", name, "--precision", "fp64", *more)
    run("train", file, "--resume", "runs/two", "--steps", "17", "--name", "on", "--precision", "fp64", *more)
    run("train", file, "--steps", "17", "--name", "whole", "--precision", "fp64", *more)
    single, two = (Record.read(Path("runs") / name) for name in where)
    assert two.losses == pytest.approx(single.losses, rel=1e-9)
    for ours, theirs in (("two", "single"), ("on", "whole")):
        assert furthest(*(newest_weights(Path("runs") / name) for name in (ours, theirs))) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_made_by_parameter_names_learn_what_one_device_learns(strategy: str) -> None:
    Path("named.py").write_text(NAMED.replace("        scheduler=", "        # "))
    check_equal_to_single("named.py", strategy)


@pytest.mark.slow
def test_verify_passes_groups_made_by_parameter_names() -> None:
    Path("named.py").write_text(NAMED)
    run("verify", "named.py", "--strategies", "dp,ddp,fsdp", "--devices", "2")


def test_an_optimizer_that_needs_a_closure_is_refused_before_the_start() -> None:
    Path("named.py").write_text(NAMED)
    said = run("train", "named.py:closed", "--devices", "2", code=2)
    assert "LBFGS.step needs a closure that computes the loss again" in said
    assert not Path("runs").exists()


GAN = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from evenstep import Task

def slower(step):
    return 1 / (1 + step)

x = torch.randn(60, 3) + 2
z = torch.randn(60, 2)

class Net(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:]))

    def forward(self, x):
        return self.layers(x)

def d_loss(models, batch):
    real, noise = batch
    return F.softplus(-models.d(real)).mean() + F.softplus(models["d"](models.g(noise))).mean()

def g_loss(models, batch):
    return F.softplus(-models.d(models.g(batch[1]))).mean() + models.teacher(models.g(batch[1])).square().mean()

def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

def task() -> Task:
    return Task(
        model=lambda: {"d": Net(3, 5, 1), "g": Net(2, 4, 3), "teacher": nn.Linear(3, 2)},
        train=(x, z),
        valid=(x[:11], z[:11]),
        loss={"d": d_loss, "g": g_loss},
        optimizer={"d": adam, "g": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)},
        scheduler={"g": lambda optimizer: StepLR(optimizer, 3, 0.5), "d": lambda one: LambdaLR(one, slower)},
        metrics=lambda models, batch: {"size": models.g(batch[1]).square().mean(1)},
        show=lambda models: f"{models.g(z[:1].to(models.g.layers[0].weight.dtype)).shape}",
        batch=9,
    )
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gan_learns_what_one_device_learns(strategy: str) -> None:
    Path("gan.py").write_text(GAN)
    check_equal_to_single("gan.py", strategy, "--clip", "1.0")
    record = Record.read(Path("runs/two"))
    for step in record.steps:
        assert step.loss == pytest.approx(step.logged["loss/d"] + step.logged["loss/g"])
        assert step.grad_norm == pytest.approx(math.hypot(step.logged["grad_norm/d"], step.logged["grad_norm/g"]))
        assert step.lr == step.logged["lr/d"] == pytest.approx(1e-2 / step.step)
        assert step.logged["lr/g"] == pytest.approx(0.1 * 0.5 ** ((step.step - 1) // 3))
    norms = [[step.grad_norm for step in Record.read(Path("runs", name)).steps] for name in ("single", "two")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-9)
    assert {"loss", "loss/d", "loss/g", "size"} <= record.evaluations[-1].values.keys()


@pytest.mark.slow
def test_verify_passes_a_gan() -> None:
    Path("gan.py").write_text(GAN)
    run("verify", "gan.py", "--strategies", "dp,ddp,fsdp", "--devices", "2")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    first_is_quick(
        [
            ('loss={"d": d_loss, "g": g_loss}', "loss=d_loss", "give both as dicts with the same keys"),
            ('"teacher": nn.Linear(3, 2)}', "}", "'teacher'"),
            (
                'lambda: {"d": Net(3, 5, 1), "g"',
                'lambda: {"x": Net(3, 5, 1), "g"',
                "Task.model() made only x, g, teacher",
            ),
            ("model=lambda: {", "model=lambda: Net(3, 5, 1) or {", "must return a dict of modules"),
            ("scheduler={", "scheduler=slower, scores={", "Task.scheduler is one for all, and the optimizers are d, g"),
            ('scheduler={"g"', 'scheduler={"teacher"', "Task.scheduler has teacher, d, and the optimizers are d, g"),
            ("StepLR(optimizer, 3, 0.5)", "ReduceLROnPlateau(optimizer)", "use one kind for all"),
        ]
    ),
)
def test_what_does_not_fit_is_refused_before_the_start(old: str, new: str, words: str) -> None:
    Path("gan.py").write_text(GAN.replace(old, new))
    assert words in run("train", "gan.py", code=2)
