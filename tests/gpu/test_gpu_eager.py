"""Eager steps whose losses are read late: the same steps as those that wait, and the GPU never runs out of work."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep import Task
from evenstep.errors import NonFiniteLoss, Preempted
from evenstep.plan import Plan
from evenstep.record import Record
from evenstep.training.deferred_loss import LAG, LateSteps
from evenstep.training.loop import train
from evenstep.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM, BATCH, SPOILT = 120, 12, 77
GPU = ("cuda:0",)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def data(spoilt: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(NUM, 8, generator=generator), torch.randint(0, 5, (NUM,), generator=generator)
    if spoilt:
        x[SPOILT] = float("nan")
    return x, y


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def pair(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    counted = (batch[1] > 0).float()
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * counted).sum(), counted.sum()


def logging(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    evenstep.log({"accuracy": outputs.argmax(1) == batch[1]})
    if evenstep.progress().step > 4:
        evenstep.log({"late": (outputs.sum(), len(outputs))})
    return F.cross_entropy(outputs, batch[1])


def cosine(optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)


def adamw(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-2)


def several() -> dict[str, Any]:
    def loss_of(name: str) -> Any:
        return lambda models, batch: F.cross_entropy(models[name](batch[0]), batch[1])

    names = ("one", "other")
    return {
        "model": lambda: {name: Net() for name in names},
        "loss": {name: loss_of(name) for name in names},
        "optimizer": dict.fromkeys(names, adamw),
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "schedule and clip": ({"scheduler": cosine}, {"clip": 0.1}),
    "ema, ragged": ({"ema": 0.9}, {"batch": 13}),
    "pair": ({"loss": pair}, {"accumulate": 2}),
    "logs": ({"loss": logging}, {}),
    "sgd": ({"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9)}, {}),
    "fp64": ({"loss": pair}, {"precision": "fp64", "accumulate": 3}),
    "bf16": ({}, {"precision": "bf16"}),
    "statistics": ({}, {"statistics": 3}),
    "several": (several(), {"clip": 1.0}),
}
WHERE = {"single": GPU, "dp": GPU * 2}


def task(**changes: Any) -> Task:
    return replace(Task(model=Net, train=data(), loss=mean, optimizer=adamw, batch=BATCH), **changes)


def without_dropout(changes: dict[str, Any]) -> dict[str, Any]:
    """Replicas on one GPU share its generator, and their threads draw in any order."""
    nets = {"model": lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5))}
    names = changes["loss"] if isinstance(changes.get("loss"), dict) else None
    return (
        {**changes, **nets} if names is None else {**changes, "model": lambda: {one: nets["model"]() for one in names}}
    )


def trained(case: str, strategy: str, name: str) -> Record:
    changes, more = CASES[case]
    changes = without_dropout(changes) if strategy == "dp" else changes
    options = {"strategy": strategy, "devices": WHERE[strategy], "fast": "off", "epochs": 2, "name": name}
    return evenstep.train(task(**changes), **{**options, **more})


def files_of(record: Record) -> dict[str, torch.Tensor]:
    assert record.summary is not None
    folder = Path(str(record.summary.checkpoint))
    return {
        f"{file.name}/{key}": value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()
    }


def reads_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstep.training.deferred_loss.can_be_stopped", lambda optimizer: False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", WHERE)
def test_late_steps_are_those_that_read_their_loss_first(
    case: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = trained(case, strategy, "late")
    reads_early(monkeypatch)
    early = trained(case, strategy, "early")
    for one, other in zip(late.steps, early.steps, strict=True):
        assert (one.step, one.lr, one.count, one.epoch) == (other.step, other.lr, other.count, other.epoch)
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.logged == pytest.approx(other.logged, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    weights, expected = files_of(late), files_of(early)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-7)


def state_at_failure(case: str, strategy: str) -> tuple[str, list[torch.Tensor]]:
    """The message, and weights and optimizer state when the loss was not finite."""
    changes, more = CASES[case]
    changes = {**(without_dropout(changes) if strategy == "dp" else changes), "train": data(spoilt=True)}
    team = evenstep.join(strategy, WHERE[strategy], more.get("precision", "fp32"), seed=3)
    options = {"batch": BATCH, "strategy": strategy, "devices": WHERE[strategy], "epochs": 2, "fast": "off", "seed": 3}
    from evenstep.training.several_models import in_turn

    job = Trainer(Plan(**{**options, **more}), in_turn(task(**changes)), Path("here"), team)
    with pytest.raises(NonFiniteLoss) as error:
        for _ in train(job.run, job.stepper, job.plan, dict):
            pass
    job.close()
    held = [weight.detach().cpu() for model in job.run.models.values() for weight in model.weights]
    for optimizer in job.run.optimizers.values():
        held += [value.cpu() for state in optimizer.state.values() for value in state.values() if value is not None]
    return str(error.value), held


@pytest.mark.parametrize("case", ["plain", "schedule and clip", "pair", "sgd", "fp64", "several"])
@pytest.mark.parametrize("strategy", WHERE)
def test_a_loss_that_is_not_finite_leaves_the_weights_of_the_step_before(
    case: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, held = state_at_failure(case, strategy)
    reads_early(monkeypatch)
    expected_message, expected = state_at_failure(case, strategy)
    # Where a loss is read at once, its samples are still there, and those that hold NaN are named besides.
    assert message.split(".\n")[0] == re.split(r": among them|\.\n", expected_message)[0]
    assert "The weights were not changed by this step" in message
    assert "rank 0 got nan for samples" in message
    for one, other in zip(held, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_both_ranks_of_ddp_stop_at_the_spoilt_sample_of_one() -> None:
    Path("my_task.py").write_text(
        "from tests.gpu.test_gpu_eager import data, task as made\n\n\ndef task():\n    return made(train=data(True))\n"
    )
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", "--strategy", "ddp", "--devices"]
    ended = subprocess.run([*command, "cuda:0,cuda:0", "--name", "two"], capture_output=True, text=True, timeout=200)
    assert ended.returncode != 0
    assert "the loss is nan at step" in ended.stderr, ended.stderr[-3000:]
    assert str(SPOILT) in ended.stderr
    assert "The weights were not changed by this step" in ended.stderr


def test_a_stop_is_agreed_on_and_saved_at_the_last_step_that_was_taken() -> None:
    loss_of = mean
    calls = [0]

    def stopping(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 8:
            signal.raise_signal(signal.SIGUSR1)
        return loss_of(model, batch)

    with pytest.raises(Preempted) as stopped:
        evenstep.train(task(loss=stopping), epochs=3, fast="off", name="stopped", devices=GPU)
    steps = [step.step for step in Record.read("runs/stopped").steps]
    assert steps == list(range(1, len(steps) + 1))
    assert 8 <= len(steps) <= 8 + LAG + 1
    assert f"step-{steps[-1]:08d}" in str(stopped.value)
    rest = evenstep.train(task(), epochs=3, fast="off", name="rest", devices=GPU, resume="runs/stopped")
    assert rest.steps[0].step == steps[-1] + 1


def stepper_of(made: Task, **options: Any) -> tuple[Trainer, Any]:
    team = evenstep.join("single", GPU)
    usual = {"batch": BATCH, "devices": GPU, "epochs": None, "steps": 200, "fast": "off", "resident": True}
    job = Trainer(Plan(**{**usual, **options}), made, Path("here"), team)
    return job, train(job.run, job.stepper, job.plan, dict)


@pytest.mark.parametrize("case", ["plain", "schedule and clip", "ema, ragged", "pair", "logs", "sgd", "several"])
def test_a_steady_eager_step_waits_for_nothing(case: str) -> None:
    """torch raises at every operation that waits, and the GPU is never without work when a step has been taken."""
    changes, more = CASES[case]

    def slowly(loss: Any) -> Any:
        def slow(model: Any, batch: Any) -> Any:
            torch.cuda._sleep(20_000_000)  # about 10 ms, longer than the host needs for a step
            return loss(model, batch)

        return slow

    loss = changes.get("loss", mean)
    slow = {key: slowly(one) for key, one in loss.items()} if isinstance(loss, dict) else slowly(loss)
    from evenstep.training.several_models import in_turn

    job, steps = stepper_of(in_turn(task(**{**changes, "loss": slow})), **{**more, "batch": 24})
    for _ in range(8):
        next(steps)
    idle: list[bool] = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(24):
            if next(steps).step.step < job.run.step:
                idle.append(torch.cuda.current_stream().query())
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    job.close()
    assert job.stepper.lag == LAG
    # A host that is busy with other tests may be late itself.
    assert sum(idle) <= 2 < len(idle)


@pytest.mark.parametrize("resident", [True, False])
def test_the_next_step_is_launched_before_the_last_one_has_ended(resident: bool) -> None:
    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.cuda._sleep(400_000_000)  # about 0.2 s
        return mean(model, batch)

    job, steps = stepper_of(task(loss=slow), resident=resident)
    for _ in range(4):
        next(steps)
    torch.cuda.synchronize()
    batches = iter(job.run.loader)
    first, _ = (job.stepper.take(next(batches)) for _ in range(2))
    assert not first.event.query()  # type: ignore[attr-defined]
    job.stepper.settle()  # type: ignore[attr-defined]
    job.close()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda weights: torch.optim.RMSprop(weights, lr=1e-3),
        lambda weights: torch.optim.AdamW(weights, lr=1e-3, foreach=True),
    ],
)
def test_an_update_that_cannot_be_stopped_on_the_gpu_waits_for_the_loss(optimizer: Any) -> None:
    job, steps = stepper_of(task(optimizer=optimizer))
    assert isinstance(job.stepper, LateSteps)
    assert not job.stepper.is_late
    losses = [next(steps).step.loss for _ in range(40)]
    assert losses[-1] < losses[0]
    job.close()


def test_a_hook_of_the_optimizer_sees_no_step_that_was_stopped() -> None:
    job, steps = stepper_of(task(train=data(spoilt=True)))
    taken: list[int] = []
    (optimizer,) = job.run.optimizers.values()
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    rows = []
    with pytest.raises(NonFiniteLoss):
        for row in steps:
            rows.append(row)
    job.close()
    assert len(taken) == job.run.step
