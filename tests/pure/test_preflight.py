"""The check before the start tries a task as a step and as an evaluation will: what it passes trains to the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenstep.record import Record
from evenstep.training.evaluation import Evaluator
from tests.pure.conftest import Ended

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.arange(80.0).reshape(20, 4) / 80
y = torch.arange(20) % 2

class Flow(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(x, y)

def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def mixup(batch, draws):
    images, labels = batch
    other = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    share = draws.uniform(1)
    soft = F.one_hot(labels, 2).float()
    return share * images + (1 - share) * images[other], share * soft + (1 - share) * soft[other]

def soft_loss(model, batch):
    return -(batch[1] * model(batch[0]).log_softmax(1)).sum(1).mean()

def two_views(sample, generator):
    return tuple(sample[0] + 0.1 * torch.randn(4, generator=generator) for _ in range(2))

def contrastive(model, batch):
    first, second = (F.normalize(model(view), dim=1) for view in batch)
    return F.cross_entropy(first @ second.T, torch.arange(len(first)))

def penalty(model, batch):
    images = batch[0].clone().requires_grad_()
    scores = model(images)
    (slope,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
    return F.cross_entropy(scores, batch[1]) + slope.square().sum(1).mean()

def maml(model, batch):
    weights = dict(model.named_parameters())
    inner = F.cross_entropy(torch.func.functional_call(model, weights, batch[0]), batch[1])
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    moved = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes)}
    return F.cross_entropy(torch.func.functional_call(model, moved, batch[0]), batch[1])

def frozen_norm():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[1].eval()
    return model

def task() -> Task:
    return Task(
        **{
            "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
            "train": (x, y),
            "loss": mean,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            "batch": 5,
        }
        | dict(PARTS)
    )
"""


@pytest.fixture
def train(evenstep: Callable[..., Ended]) -> Callable[..., Ended]:
    """`train("loss=penalty")` trains a task of these parts for two epochs."""

    def command(parts: str, *more: str) -> Ended:
        Path("my_task.py").write_text(TASK.replace("PARTS", parts))
        return evenstep("train", "my_task.py", "--epochs", "2", "--name", "tried", *more)

    return command


@pytest.mark.parametrize(
    "parts",
    [
        "augment_batch=mixup, loss=soft_loss",
        "augment_batch=mixup, loss=soft_loss, train=Flow()",
        "augment_batch=mixup, valid=(x, y)",
        "augment=two_views, loss=contrastive",
        "augment=two_views, loss=contrastive, train=Flow()",
        "metrics=lambda model, batch: {'right': model(batch[0]).argmax(1) == batch[1]}, valid=(x, y)",
        "metrics=lambda model, batch: {'one': 1, 'two': (2.0, 4), 'three': torch.ones(2)}, valid=Flow()",
        "metrics=lambda model, batch: {}, valid=(x, y)",
        "metrics=lambda model, batch: 1 / 0",
        "model=frozen_norm, batch=19",
        "model=frozen_norm, batch=1, valid=(x, y)",
    ],
)
def test_what_a_step_and_an_evaluation_can_compute_is_trained(train: Callable[..., Ended], parts: str) -> None:
    ended = train(parts)
    assert ended.code == 0, ended.err
    assert Record.read("runs/tried").summary is not None


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            "model=nn.Linear(4, 2)",
            "Task.model is an instance of Linear, and every process makes its own; write model=lambda: Linear(...)\n",
        ),
        ("model=None", "Task.model is a NoneType; give a function that makes the model: model=lambda: Net()"),
        (
            "optimizer=torch.optim.SGD([x], lr=0.1)",
            "Task.optimizer is an instance of SGD, and every process makes its own; "
            "write optimizer=lambda parameters: SGD(parameters, ...)\n",
        ),
        (
            "scheduler=torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([x], lr=0.1))",
            "Task.scheduler is an instance of ConstantLR, and every process makes its own; "
            "write scheduler=lambda optimizer: ConstantLR(optimizer, ...)\n",
        ),
        (
            "loss=nn.MSELoss()",
            "Task.loss is nn.MSELoss, and the loss is called as loss(model, batch); "
            "write loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])\n",
        ),
        (
            "loss=nn.KLDivLoss",
            "Task.loss is nn.KLDivLoss, and the loss is called as loss(model, batch); "
            "write loss=lambda model, batch: nn.KLDivLoss(...)(model(batch[0]), batch[1])\n",
        ),
        (
            "loss=F.cross_entropy",
            "Task.loss is nn.functional.cross_entropy, and the loss is called as loss(model, batch); "
            "write loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])\n",
        ),
        ("model=lambda: nn.Linear('4', 2)", "the model cannot be built: TypeError: "),
        ("augment=lambda sample, generator: 1 / 0", "sample 0 cannot be augmented: ZeroDivisionError: division by"),
        ("augment_batch=lambda batch, draws: 1 / 0", "augment_batch cannot be computed: ZeroDivisionError: division"),
        ("augment=two_views, loss=contrastive, valid=(x, y)", "the loss of the valid data cannot be computed: "),
        ("loss=soft_loss, valid=(x, F.one_hot(y, 3))", "the loss cannot be computed: "),
        (
            "metrics=lambda model, batch: model(batch[0]).mean(), valid=(x, y)",
            "metrics returned a Tensor; return a dict of named values: {'accuracy': correct.float()}",
        ),
        ("metrics=lambda model, batch: None, valid=(x, y)", "metrics returned a NoneType; return a dict of named"),
        (
            "metrics=lambda model, batch: {'name': 'a text'}, valid=(x, y)",
            "the metric 'name' is a str; give one value per sample, a mean, or a pair (sum, count)",
        ),
        (
            "metrics=lambda model, batch: {'all': (1, 2, 3)}, valid=(x, y)",
            "all returned 3 values; return a mean, or a pair (sum, count)",
        ),
        ("metrics=lambda model, batch: 1 / 0, valid=(x, y)", "the metrics cannot be computed: ZeroDivisionError: "),
    ],
    ids=lambda value: value,
)
def test_what_they_cannot_is_refused(train: Callable[..., Ended], parts: str, said: str) -> None:
    ended = train(parts)
    assert ended.code == 2, ended.err
    assert ended.err.startswith(f"error: {said}")
    assert len(ended.err.splitlines()) <= 2
    assert not Path("runs").exists()


def test_augment_is_said_to_change_training_samples_alone(train: Callable[..., Ended]) -> None:
    ended = train("augment=two_views, loss=contrastive, valid=(x, y)")
    assert "augment and augment_batch change training samples alone" in ended.err


@pytest.mark.parametrize("loss", ["penalty", "maml"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_takes_gradients_itself_is_evaluated(
    train: Callable[..., Ended], loss: str, precision: str
) -> None:
    metrics = "lambda model, batch: {'mean': model(batch[0]).float().mean(1).numpy()}"
    ended = train(f"loss={loss}, metrics={metrics}, valid=(x[:7], y[:7])", "--precision", precision)
    assert ended.code == 0, ended.err
    values = [one.values["loss"] for one in Record.read("runs/tried").evaluations]
    assert len(values) == 2
    assert all(math.isfinite(value) for value in values)


def test_gradients_are_on_only_where_they_are_needed_and_draws_come_once() -> None:
    layer, seen, drawn = nn.Linear(3, 1), [], []

    def work(needs: bool) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        drawn.append(torch.rand(()))
        scores = layer(torch.ones(2, 3)).sum()
        return torch.autograd.grad(scores, layer.weight)[0].sum() if needs else scores

    evaluate, other = Evaluator(), Evaluator()
    torch.manual_seed(1)
    assert evaluate(work, True) == 6
    evaluate(work, True)
    for _ in range(2):
        other(work, False)
    assert seen == [False, True, True, False, False]
    torch.manual_seed(1)
    assert [one.item() for one in drawn[1:]] == [torch.rand(()).item() for _ in range(4)]
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Evaluator()(lambda: F.linear(torch.ones(2, 3), torch.ones(2, 2)))


# Steps that leave a device with one sample.


NORMED = "model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))"
PICTURES = "model=lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))"
OF_TASK = "train=(x[:18], y[:18]), sampler=range(18), batch=8, drop_last=True"
EIGHTEEN = "train=torch.utils.data.DataLoader(list(zip(x[:18], y[:18])), batch_size=8, drop_last=True)"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "--batch 19",
            "the last step of an epoch (1 sample) leaves one sample for a device;\n"
            "use drop_last=True in the Task, or --batch 18",
        ),
        (
            "--batch 17 --strategy dp --devices cpu,cpu",
            "the last step of an epoch (3 samples over 2 devices) leaves one sample for a device;\n"
            "use drop_last=True in the Task, or --batch 16",
        ),
        (
            "--batch 6 --strategy ddp --devices cpu,cpu --accumulate 2",
            "every step (6 samples over 2 devices in 2 micro-batches) leaves one sample for a device;\n"
            "use --sync-batchnorm, or --batch 10",
        ),
        (
            "--batch 19 --strategy ddp --devices cpu,cpu",
            "the last step of an epoch (1 sample over 2 devices) leaves one sample for a device;\n"
            "use drop_last=True in the Task, or --batch 20",
        ),
        (
            "--batch 19 --strategy ddp --devices cpu,cpu --sync-batchnorm",
            "the last step of an epoch (1 sample over 2 devices) leaves one sample for a device;\n"
            "use drop_last=True in the Task, or --batch 20",
        ),
        ("--batch 1", "every step (1 sample) leaves one sample for a device;\nuse --batch 2"),
    ],
)
def test_batchnorm_with_one_sample_is_foreseen(train: Callable[..., Ended], more: str, said: str) -> None:
    ended = train(NORMED, *more.split())
    assert ended.code == 2, ended.err
    assert ended.err == f"error: BatchNorm cannot be trained on one sample, and {said}\n"
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("parts", "more"),
    [
        (NORMED, "--batch 18"),
        (PICTURES, "--batch 19"),
        (f"{NORMED}, {EIGHTEEN}", "--batch 17"),
        (f"{NORMED}, {OF_TASK}", "--batch 17"),
        ("loss=mean", "--batch 19"),
    ],
    ids=["two samples", "more values than samples", "dropped", "dropped by the task", "no BatchNorm"],
)
def test_what_can_be_trained_on_one_sample_is_trained(train: Callable[..., Ended], parts: str, more: str) -> None:
    ended = train(parts, *more.split())
    assert ended.code == 0, ended.err


def test_a_loss_that_one_sample_breaks_is_foreseen(train: Callable[..., Ended]) -> None:
    ended = train("loss=lambda model, batch: (model(batch[0])[0] - model(batch[0])[1]).norm()", "--batch", "19")
    assert ended.code == 2, ended.err
    assert ended.err.startswith("error: the loss cannot be computed: IndexError: index 1 is out of bounds")
    assert "; the last step of an epoch (1 sample) leaves one sample for a device" in ended.err


@pytest.mark.parametrize("data", ["(x, y)", "Flow()"])
def test_a_loss_that_works_on_a_whole_batch_alone_is_explained(train: Callable[..., Ended], data: str) -> None:
    ended = train(f"loss=lambda model, batch: model(batch[0]).view(10).mean(), train={data}")
    assert ended.code == 2
    assert "shape '[10]' is invalid for input of size 8 " in ended.err
    assert ended.err.endswith(
        "; tried on 4 samples, and it works on 5:\n"
        "a loss must work for any number of samples, since the last batch may be smaller\n"
    )


def test_the_samples_of_a_loss_that_never_works_are_counted(train: Callable[..., Ended]) -> None:
    ended = train("loss=lambda model, batch: model(batch[0]).view(7).mean(), train=(x[:3], y[:3]), batch=3")
    assert ended.err.endswith("; tried on 3 samples\n")
    ended = train("metrics=lambda model, batch: 1 / 0, valid=(x[:1], y[:1])")
    assert ended.err.endswith("; tried on 1 sample\n")
    ended = train("model=lambda: nn.Linear('4', 2)")
    assert "tried on" not in ended.err


def test_a_run_that_ends_before_the_short_step_is_trained(evenstep: Callable[..., Ended]) -> None:
    Path("my_task.py").write_text(TASK.replace("PARTS", NORMED))
    assert evenstep("train", "my_task.py", "--batch", "19", "--steps", "1").code == 0
    assert evenstep("train", "my_task.py", "--batch", "19", "--steps", "2").code == 2


# The short last batch of an epoch, dropped.

COSINE = "scheduler=lambda optimizer, num_steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)"


@pytest.mark.parametrize(
    ("data", "more"),
    [
        (f"{EIGHTEEN}, batch=None", ""),
        (OF_TASK, ""),
        (OF_TASK, "--strategy dp --devices cpu,cpu"),
        pytest.param(OF_TASK, "--strategy ddp --devices cpu,cpu", marks=pytest.mark.slow),
        pytest.param(OF_TASK, "--strategy fsdp --devices cpu,cpu", marks=pytest.mark.slow),
    ],
)
def test_drop_last_is_followed_from_the_schedule_to_the_audit(
    train: Callable[..., Ended], data: str, more: str
) -> None:
    ended = train(f"{data}, {COSINE}", "--audit", *more.split())
    assert ended.code == 0, ended.err
    assert "drop_last leaves 2 of 18 samples out of each epoch, its short last batch\n" in ended.err
    assert f"global batch 8 = {'2 devices x 4' if more else '1 device x 8'}; 2 steps per epoch\n" in ended.err
    assert "16 samples x 2 epochs, 0 repeated, 0 missed, 4 left out by drop_last\n" in ended.out
    record = Record.read("runs/tried")
    assert [step.samples for step in record.steps] == [8, 8, 8, 8]
    assert [step.epoch_samples for step in record.steps] == [16] * 4
    assert [round(step.lr, 6) for step in record.steps] == [0.1, 0.085355, 0.05, 0.014645]


def test_drop_last_goes_on_in_mid_epoch_with_the_batch_it_had(evenstep: Callable[..., Ended]) -> None:
    Path("my_task.py").write_text(TASK.replace("PARTS", f"{EIGHTEEN}, batch=None"))
    assert evenstep("train", "my_task.py", "--steps", "3", "--name", "cut", "--audit").code == 0
    other = evenstep("train", "--resume", "runs/cut", "--epochs", "3", "--batch", "7")
    assert other.code == 2
    assert "(in order in whole batches of 8) than the one now requested (in order in whole batches of 7)" in other.err
    rest = evenstep("train", "--resume", "runs/cut", "--epochs", "3", "--name", "rest", "--audit")
    assert rest.code == 0, rest.err
    audited = evenstep("audit", "runs/cut", "runs/rest")
    assert audited.code == 0, audited.out
    assert audited.out.splitlines()[0] == "16 samples x 3 epochs, 0 repeated, 0 missed, 6 left out by drop_last"


def test_drop_last_of_valid_data_smaller_than_the_batch_drops_nothing(train: Callable[..., Ended]) -> None:
    data = "torch.utils.data.DataLoader(list(zip(x.repeat({0}, 1), y.repeat({0}))), batch_size=64, drop_last=True)"
    ended = train(f"batch=None, train={data.format(13)}, valid={data.format(2)}")
    assert ended.code == 0, ended.err
    assert "the valid DataLoader's drop_last is ignored: an evaluation counts every sample\n" in ended.err
    assert [one.samples for one in Record.read("runs/tried").evaluations] == [40, 40]
