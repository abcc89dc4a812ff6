"""Is the recommendation of `evenstep compare` right? Tasks that are made so that the answer is known.

python bench/advice.py [OUT.json]      two CPU cores; exit code 1 if an answer is wrong

Memory that is uneven cannot be made on the CPU, nor with one card: that case is a table of numbers, in
tests/pure/test_recommend.py, as are all the others once more.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import harness
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from evenstep import Task
from evenstep.compare.compare_strategies import CompareRequest, Comparison, compare
from evenstep.report.recommend import best


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """A sample takes a millisecond to read."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, id_: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.001)
        return torch.full((64,), float(id_ % 7)), torch.tensor(id_ % 10)


def input_bound() -> Task:
    return _task(Slow(), lambda: _mlp(64, 64, 10), batch=32)


def communication_bound() -> Task:
    return _task(_random(64, 4096), lambda: _mlp(64, 2048, 2048, 2048, 10), batch=4)


def tiny() -> Task:
    return _task(_random(20, 8192), lambda: _mlp(20, 16, 5), batch=16)


def fine() -> Task:
    def model() -> nn.Module:
        convolutions = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 14 * 14, 10))

    x = torch.randn(2048, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return _task((x, torch.arange(2048) % 10), model, batch=64)


def _random(width: int, num: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(0)), torch.arange(num) % 5


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for first, second in pairwise(widths):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _task(train: Any, model: Callable[[], nn.Module], batch: int) -> Task:
    return Task(
        model=model,
        train=train,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=batch,
    )


@dataclass(frozen=True)
class Case:
    """A task, and what must be said about it."""

    task: str
    expected: str
    is_right: Callable[[Comparison], bool]
    choices: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case(
        "input_bound", "the bottleneck is input", lambda found: "Bottleneck: input" in found.advice[2], {"workers": 0}
    ),
    Case("communication_bound", "one device; ddp waits to send", lambda found: _waits_to_send(found)),
    Case(
        "tiny",
        "one device, and a larger batch",
        lambda found: best(found).label == "single" and "Bottleneck: the batch" in found.advice[2],
    ),
    Case(
        "fine",
        "two devices, and no bottleneck stands out",
        lambda found: len(best(found).devices) == 2 and "none stands out" in found.advice[2],
        {"threads": 1},
    ),
)


def _waits_to_send(found: Comparison) -> bool:
    """The one device is taken, and of ddp it is said what sending costs it."""
    ddp = next(part for part in found.advice[1].split("; ") if "ddp x 2" in part)
    return best(found).label == "single" and "with free communication" in ddp


def main() -> None:
    rows, results, wrong = [], {}, 0
    for case in CASES:
        request = CompareRequest(source=f"{__file__}:{case.task}", strategies="dp,ddp", choices=case.choices)
        found, folder = compare(request)
        shutil.rmtree(folder)
        right = case.is_right(found)
        wrong += not right
        rows.append([case.task, case.expected, "right" if right else "WRONG", found.advice[0]])
        rows += [["", "", "", found.advice[1]], ["", "", "", found.advice[2]]]
        results[case.task] = {"expected": case.expected, "right": right, "advice": found.advice}
    harness.show("\nWhat compare recommends", ["task", "expected", "", "said"], rows)
    if sys.argv[1:]:
        harness.write(sys.argv[1], "python bench/advice.py", results)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
