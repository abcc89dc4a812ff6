"""Mean average precision by torchmetrics as a score: of ranked answers and of boxes, equal on 1, 2 and 3 processes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import evenstep
from evenstep.record import Record
from tests.fleet import newest_weights
from tests.lazy import Lazy, needs
from tests.marks import first_is_quick

pytestmark = needs("torchmetrics")
retrieval = Lazy("torchmetrics.retrieval")

RANKED = """
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics.retrieval import RetrievalMAP
from evenstep import Task

def data(num):
    draws = torch.Generator().manual_seed(num)
    x = torch.randn(num, 5, generator=draws)
    query = torch.randint(0, 9, (num,), generator=draws)
    return x, ((x[:, 0] + torch.randn(num, generator=draws)) > 0.5).long(), query

class MAP(RetrievalMAP):
    def update(self, predictions, targets):
        super().update(predictions["answer"], targets, indexes=predictions["query"])

def predict(model, batch):
    return {"answer": model(batch[0]).squeeze(1), "query": batch[2]}, batch[1]

def task() -> Task:
    return Task(
        model=lambda: nn.Linear(5, 1),
        train=data(40),
        valid=data(101),
        loss=lambda model, batch: F.binary_cross_entropy_with_logits(
            model(batch[0]).squeeze(1), batch[1].to(batch[0].dtype)
        ),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        predict=predict,
        scores={"map": MAP(empty_target_action="skip")},
        batch=8,
    )
"""
BOXES = """
import torch
from torch import nn
from evenstep import Task
METRIC

def data(num):
    draws = torch.Generator().manual_seed(num)
    corner = 20 * torch.rand(num, 2, generator=draws)
    return torch.cat([corner, corner + 5 + 10 * torch.rand(num, 2, generator=draws)], 1), torch.arange(num)

def predict(model, batch):
    found = model(batch[0])
    # None, one or two boxes in a picture.
    numbers = [int(one) % 3 for one in batch[1]]
    boxes = [
        {"boxes": box.repeat(num, 1), "scores": box[:1].sigmoid().repeat(num), "labels": torch.zeros(num).long()}
        for box, num in zip(found, numbers)
    ]
    truth = [{"boxes": box[None], "labels": torch.zeros(1).long()} for box in batch[0]]
    return boxes, truth

def task() -> Task:
    return Task(
        model=lambda: nn.Linear(4, 4),
        train=data(40),
        valid=data(29),
        loss=lambda model, batch: (model(batch[0]) - batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        predict=predict,
        scores={"boxes": Metric()},
        batch=8,
        epochs=8,
    )
"""
OWN = """
class Metric:
    # How far boxes are from the truth, in pixels, and how many there are.
    def reset(self):
        self.far, self.num = [], 0

    def update(self, predictions, targets):
        for one, truth in zip(predictions, targets):
            self.far += (one["boxes"] - truth["boxes"]).abs().flatten().tolist()
            self.num += len(one["scores"])

    def compute(self):
        return {"far": sum(self.far) / len(self.far), "num": self.num}
"""
DETECTION = "from torchmetrics.detection import MeanAveragePrecision as Metric"
NEEDS_DETECTION = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torchvision", "pycocotools")),
    reason="torchmetrics.detection needs torchvision and pycocotools",
)


def evaluated(size: int) -> dict[str, Any]:
    devices = ("--strategy", "ddp", "--devices", ",".join(["cpu"] * size))
    command = [sys.executable, "-m", "evenstep", "evaluate", "runs/mine", *devices, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout)["values"]
    values.pop("loss")
    return values


def trained(task: str) -> Record:
    Path("my_task.py").write_text(task)
    return evenstep.train("my_task.py", name="mine", precision="fp64", threads=1, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("size", first_is_quick([2, 1, 3]))
def test_map_of_ranked_answers_is_that_of_the_whole_set(size: int) -> None:
    trained(RANKED)
    scope: dict[str, Any] = {}
    exec(RANKED, scope)
    x, y, query = scope["data"](101)
    weights = newest_weights(Path("runs/mine"))
    answers = (x.double() @ weights["weight"].double().T + weights["bias"].double()).squeeze(1)
    metric = retrieval.RetrievalMAP(empty_target_action="skip")
    metric.update(answers, y, indexes=query)
    assert evaluated(size) == {"map": pytest.approx(float(metric.compute()), rel=1e-6)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "metric",
    [OWN, pytest.param(DETECTION, marks=NEEDS_DETECTION)],
    ids=["own", "torchmetrics"],
)
@pytest.mark.parametrize("size", first_is_quick([3, 2]))
def test_scores_of_boxes_are_those_of_one_process(size: int, metric: str) -> None:
    alone = trained(BOXES.replace("METRIC", metric)).evaluations[-1].values
    values = evaluated(size)
    assert values == {name: pytest.approx(alone[name], rel=1e-9) for name in alone if name != "loss"}
    assert values.get("boxes/num", 28) == 28
    assert torch.isfinite(torch.tensor(list(values.values()))).all()
