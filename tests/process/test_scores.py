"""Scores of all predictions: AUC, F1 and mean average precision equal scikit-learn on any number of devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, precision_score, roc_auc_score
from torch import nn

import evenstep
from evenstep import Task
from evenstep.errors import PlanError, TaskError
from evenstep.record import Record
from evenstep.report.run_list import list_runs
from evenstep.training.scores import Scores, as_numbers, as_pair_of_tensors, joined
from tests.fleet import newest_weights
from tests.marks import first_is_quick

TASK = """
from functools import partial
import torch
from sklearn.metrics import average_precision_score, f1_score, precision_score, roc_auc_score
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassF1Score
from evenstep import Task

def data(num):
    draws = torch.Generator().manual_seed(num)
    x = torch.randn(num, 6, generator=draws)
    return x, (x[:, :3] + torch.randn(num, 3, generator=draws)).argmax(1), torch.arange(num)

def predict(model, batch):
    logits = model(batch[0])
    return {"logits": logits, "id": batch[2], "text": [str(int(one)) for one in batch[1]]}, batch[1]

def is_in_order(predictions, targets):
    texts = [str(int(one)) for one in targets]
    return float(predictions["id"].tolist() == list(range(len(targets))) and predictions["text"] == texts)

class Seen:
    # As an object of torchmetrics, without it.
    def reset(self):
        self.num = self.right = 0

    def update(self, predictions, targets):
        self.num += len(targets)
        self.right += int((predictions["logits"].argmax(1) == targets).sum())

    def compute(self):
        accuracy = torch.tensor(self.right, dtype=torch.float64) / self.num
        return {"num": self.num, "accuracy": accuracy, "of each": torch.zeros(3)}

class F1(MulticlassF1Score):
    def update(self, predictions, targets):
        super().update(predictions["logits"], targets)

def average_precision(predictions, targets):
    return average_precision_score(F.one_hot(targets, 3), predictions["logits"].softmax(1), average="macro")

def auc(y_true, y_score):
    return roc_auc_score(y_true, y_score["logits"].softmax(1), multi_class="ovr")

def task(num: int = 101) -> Task:
    return Task(
        model=lambda: nn.Linear(6, 3),
        train=data(30),
        valid=data(num),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        predict=predict,
        scores={
            "map": average_precision,
            "auc": auc,
            "f1": F1(num_classes=3, average="macro"),
            "precision": lambda predictions, targets: precision_score(
                targets, predictions["logits"].argmax(1), average="macro"
            ),
            "in_order": is_in_order,
            "seen": Seen(),
        },
        batch=8,
    )
"""


def trained(name: str, *arguments: str) -> Record:
    words = ("train", "my_task.py", "--name", name, "--precision", "fp64", "--steps", "4", *arguments)
    command = [sys.executable, "-m", "evenstep", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Record.read(Path("runs") / name)


def expected(name: str, num: int) -> dict[str, float]:
    """By scikit-learn alone, on the whole set."""
    scope: dict[str, object] = {}
    exec(TASK, scope)
    x, y, _ = scope["data"](num)  # type: ignore[operator]
    weights = newest_weights(Path("runs") / name)
    logits = x.double() @ weights["weight"].double().T + weights["bias"].double()
    likely, chosen = logits.softmax(1).numpy(), logits.argmax(1).numpy()
    accuracy = float((chosen == y.numpy()).mean())
    return {
        "accuracy": accuracy,
        "map": average_precision_score(nn.functional.one_hot(y).numpy(), likely, average="macro"),
        "auc": roc_auc_score(y.numpy(), likely, multi_class="ovr"),
        "f1": f1_score(y.numpy(), chosen, average="macro"),
        "precision": precision_score(y.numpy(), chosen, average="macro"),
        "in_order": 1.0,
        "seen/num": num,
        "seen/accuracy": accuracy,
    }


@pytest.mark.parametrize(
    ("num", "size"), first_is_quick([(101, 2), (101, 1), (101, 3), (1000, 1), (1000, 2), (1000, 3)])
)
def test_auc_f1_and_map_equal_those_of_scikit_learn(num: int, size: int) -> None:
    Path("my_task.py").write_text(TASK)
    record = trained("mine", f"num={num}", "--strategy", "ddp", "--devices", ",".join(["cpu"] * size))
    (evaluation,) = record.evaluations
    values = dict(evaluation.values)
    values.pop("loss")
    # torchmetrics computes in float32.
    assert values == pytest.approx(expected("mine", num), rel=1e-6)
    exact = {name: value for name, value in values.items() if name != "f1"}
    assert exact == pytest.approx({name: expected("mine", num)[name] for name in exact}, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_other_strategies_too(strategy: str) -> None:
    Path("my_task.py").write_text(TASK)
    trained("mine", "--strategy", strategy, "--devices", "cpu,cpu", "--accumulate", "2", "--best", "auc")
    record = Record.read("runs/mine")
    assert record.evaluations[-1].values["in_order"] == 1.0
    assert record.evaluations[-1].values["auc"] == pytest.approx(expected("mine", 101)["auc"], rel=1e-12)
    assert record.summary is not None
    assert record.summary.best is not None
    assert record.summary.best.metric == "auc"


x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))


class Counting(nn.Linear):
    """Counts its forwards in evaluation mode."""

    num = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        Counting.num += not self.training
        return super().forward(input)


def shared(model: nn.Module, batch: tuple[torch.Tensor]) -> dict[str, torch.Tensor]:
    errors = model(batch[0]).square().sum(1)
    return {"loss": errors, "worst": errors.max()}


def small_task(**more: object) -> Task:
    return Task(
        model=lambda: Counting(2, 1),
        train=(x,),
        valid=(x,),
        loss=lambda model, batch: model(batch[0]).square().sum(1).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=10,
        **more,  # type: ignore[arg-type]
    )


def test_metrics_that_hold_the_loss_share_one_forward_with_it() -> None:
    apart = evenstep.train(small_task(metrics=lambda model, batch: {"other": model(batch[0])[:, 0]}), threads=1)
    before = Counting.num
    together = evenstep.train(small_task(metrics=shared), threads=1)
    # Two batches; and the dry run, which computes the loss and the metrics.
    assert Counting.num - before == 2 + 2
    assert list(together.evaluations[-1].values) == ["loss", "worst"]
    assert together.evaluations[-1].values["loss"] == pytest.approx(apart.evaluations[-1].values["loss"])


def pair(model: nn.Module, batch: tuple[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch[0])[:, 0], batch[0][:, 0] > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scores": {"auc": roc_auc_score}}, "scores need predict(model, batch) -> (predictions, targets)"),
        ({"predict": pair}, "predict is for scores, and the task has none"),
        ({"predict": pair, "scores": {"auc": 0.5}}, "the score 'auc' is 0.5; give a function of"),
        ({"predict": pair, "scores": {"auc": Scores}}, "the score 'auc' is the class Scores; give a function of"),
        (
            {"predict": lambda model, batch: model(batch[0]), "scores": {"auc": roc_auc_score}},
            "predict returned a Tensor; return a pair: (predictions, targets)",
        ),
        ({"predict": pair, "scores": {"f1": lambda p, t: p}}, "the score 'f1' is a Tensor of "),
        ({"predict": pair, "scores": {"loss": roc_auc_score}}, "'loss' is both a score and one of the metrics"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_the_start(given: dict[str, object], said: str) -> None:
    with pytest.raises(TaskError) as error:
        evenstep.train(small_task(**given))
    assert said in str(error.value)
    assert not Path("runs").exists()


def test_a_dict_of_scores_is_known_by_its_keys_before_the_start() -> None:
    scores = {"map": lambda predictions, targets: {"all": 0.5, "small": 0.25}}
    with pytest.raises(PlanError, match="an evaluation has loss, map/all, map/small; "):
        evenstep.train(small_task(predict=pair, scores=scores), best="map:max")
    assert not Path("runs").exists()


def test_a_score_that_fails_names_itself() -> None:
    def broken(predictions: torch.Tensor, targets: torch.Tensor) -> float:
        raise ValueError("no positive sample")

    with pytest.raises(evenstep.EvenstepError, match=r"the score 'auc' cannot be computed: ValueError: no positive"):
        evenstep.train(small_task(predict=pair, scores={"auc": broken}), threads=1, name="broken")
    (run,) = list_runs(Path("runs"))
    assert run.state == "failed"
    assert "the score 'auc' cannot be computed" in str(run.error)


@pytest.mark.slow
def test_under_ddp_there_is_one_cause() -> None:
    Path("my_task.py").write_text(TASK.replace("def auc(y_true, y_score):", "def auc(y_true, y_score):\n    1 / 0"))
    words = ("train", "my_task.py", "--steps", "1", "--strategy", "ddp", "--devices", "cpu,cpu")
    done = subprocess.run([sys.executable, "-m", "evenstep", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "the score 'auc' cannot be computed: ZeroDivisionError: division by zero" in done.stderr


def test_what_cannot_be_joined_says_how_to_return_it() -> None:
    with pytest.raises(
        TaskError, match=r"different shapes \(\(3,\), \(4,\)\); return a list with one entry per sample"
    ):
        joined([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(TaskError, match="no batch; return tensors or lists with one entry per sample"):
        joined([torch.zeros(()), torch.zeros(())])
    with pytest.raises(TaskError, match="the score 'f1' is a Tensor of 3 numbers; it must be one number, or a dict"):
        as_numbers("f1", torch.zeros(3))
    assert as_pair_of_tensors((torch.ones(1, dtype=torch.bfloat16), ["a"]))[0].dtype is torch.float32
