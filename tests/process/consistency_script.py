"""One of two ranks that read data correctly and incorrectly; `python consistency_script.py OUT`: what each got."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import evenstep
from evenstep import samplers

team = evenstep.join("ddp", devices=("cpu", "cpu"))
rank = team.world.rank
mine = torch.Generator().manual_seed(rank)
numbers = torch.randn(40, 4)


class Deaf(Dataset[Any]):
    """Gives what comes next, whatever it is asked for."""

    def __init__(self) -> None:
        self.next = iter(torch.arange(10000.0))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, id_: int) -> torch.Tensor:
        return next(self.next).expand(4)


class Fickle(Dataset[Any]):
    """Draws from a generator that nobody can seed."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, id_: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng().random(4, dtype=np.float32))


class Parted(IterableDataset[Any]):
    """Shares itself out by rank, though every rank is to have everything."""

    def __init__(self, as_arrays: bool) -> None:
        self.as_arrays = as_arrays

    def __iter__(self) -> Iterator[Any]:
        for id_ in range(rank, 40, 2):
            yield numbers[id_].numpy() if self.as_arrays else numbers[id_]


class Whole(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for row in numbers.clone():
            yield {"x": row}


def in_place(sample: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    sample["x"] *= 2
    return sample


difficulty = torch.arange(40.0) + 3 * (torch.arange(40) % 7 == rank)
in_order = {"sampler": samplers.Sequential()}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "right": (numbers, {}),
    "all alike": (torch.ones(40, 4), {}),
    "periodic": (torch.arange(4.0).repeat(10)[:, None].expand(40, 4), in_order),
    "drawn at random": (Fickle(), {}),
    "a stream changed in place": (Whole(), {"augment": in_place}),
    "meant to differ": (torch.randn(40, 4, generator=mine), {"mine": True}),
    "deaf": (Deaf(), {}),
    "other data": (torch.randn(40, 4, generator=mine), {}),
    "other order": (numbers, {"sampler": samplers.Curriculum(difficulty)}),
    "other length": (torch.cat([numbers, numbers[: 2 * rank]]), in_order),
    "a stream shared out": (Parted(as_arrays=False), {}),
    "a stream of arrays shared out": (Parted(as_arrays=True), {}),
}


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"] if isinstance(batch, dict) else batch).mean()  # type: ignore[no-any-return]


told = {}
for name, (data, how) in CASES.items():
    model = team.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    try:
        for batch in team.loader(data, batch=8, workers=0, **how):
            team.backward(loss, model, batch)
            team.step(optimizer)
        told[name] = "nothing"
    except evenstep.EvenstepError as error:
        told[name] = str(error)
everywhere = team.world.gather(told)
assert everywhere[0] == everywhere[1]
if team.world.is_main:
    Path(sys.argv[1]).write_text(json.dumps(told))
