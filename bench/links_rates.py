"""Learning rates for N2, found in one process: what DDP, local, diloco and streaming end with, at rates of a grid.

python bench/links_rates.py [--task teacher|text] [--seeds 2] [--steps 450] [--out FILE] [NAME:RATE ...]

NAME is `ddp`, `local:STEPS`, `diloco:STEPS` or `streaming:STEPS:FRAGMENTS`. Four models stand for four ranks. There is
no network, so nothing here depends on what else the machine does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import harness
import torch
from links_loss import BATCH, NUM_VALID, TRAINED, Trained, falling, loss
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from evenstep.link_method import LinkMethod, parse_link

RANKS = 4
RATE, MOMENTUM = 0.7, 0.9
DILOCO = {"lr": RATE, "momentum": MOMENTUM, "nesterov": True}
OUTER: dict[str, dict[str, Any]] = {"local": {"lr": 1.0}, "diloco": DILOCO, "streaming": DILOCO}
GRIDS = {
    "teacher": {
        "ddp": ("2e-3", "4e-3", "6e-3"),
        "local:50": ("2e-3", "4e-3", "6e-3"),
        "diloco:50": ("1e-3", "2e-3", "4e-3"),
        "streaming:50:4": ("1e-3", "2e-3", "4e-3"),
    },
    "text": {
        "ddp": ("6e-3", "1e-2", "2e-2"),
        "local:10": ("1e-2", "2e-2", "3e-2"),
        "local:25": ("1e-2", "2e-2"),
        "diloco:10": ("2e-3", "5e-3"),
        "streaming:10:4": ("5e-3", "1e-2", "2e-2"),
    },
}


def final_loss(trained: Trained, entry: str, seed: int, num_steps: int) -> float:
    """Of the validation set, with the weights that all ranks share."""
    link, rate = entry.rsplit(":", 1)
    method = parse_link("local:1" if link == "ddp" else link)
    torch.manual_seed(seed)
    shared = trained.model()
    ranks = [deepcopy(shared) for _ in range(RANKS if method.is_local else 1)]
    inner = [torch.optim.AdamW(rank.parameters(), lr=float(rate)) for rank in ranks]
    schedules = [falling(one, num_steps) for one in inner]
    outer = torch.optim.SGD(shared.parameters(), **OUTER[method.name])
    fragments = Fragments(shared, ranks, method)
    for number, parts in enumerate(_batches(trained, seed, num_steps, len(ranks)), 1):
        for rank, optimizer, schedule, part in zip(ranks, inner, schedules, parts, strict=True):
            loss(rank, part).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if method.is_streaming:
            fragments.exchange(number, is_last=number == num_steps)
        elif number % method.num_steps == 0 or number == num_steps:
            _end_round(shared, ranks, inner, outer)
    x, y = trained.columns()
    with torch.no_grad():
        return loss(shared, (x[:NUM_VALID], y[:NUM_VALID])).item()


class Fragments:
    """Those of `streaming`: each is exchanged in turn, and merged when the next one is sent."""

    def __init__(self, shared: Any, ranks: list[Any], method: LinkMethod) -> None:
        self.shared, self.ranks, self.method = shared, ranks, method
        self.found = parameters_to_vector(shared.parameters()).detach().clone()
        self.momentum = torch.zeros_like(self.found)
        self.sent: tuple[slice, Tensor] | None = None

    @torch.no_grad()
    def exchange(self, step: int, is_last: bool) -> None:
        number, size = self.method.fragment_after(step), len(self.found)
        if number is not None or is_last:
            self._receive()
        if is_last:
            mean = self._mean()
            for rank in self.ranks:
                vector_to_parameters(mean.clone(), rank.parameters())
        if number is not None:
            part = slice(*(size * one // self.method.num_fragments for one in (number, number + 1)))
            self.sent = part, self._mean()[part]
        if is_last:
            self._receive()
            vector_to_parameters(self._mean(), self.shared.parameters())

    def _mean(self) -> Tensor:
        return torch.stack([parameters_to_vector(rank.parameters()) for rank in self.ranks]).mean(0)

    def _receive(self) -> None:
        if self.sent is None:
            return
        (part, mean), self.sent = self.sent, None
        gradient = self.found[part] - mean
        self.momentum[part] = MOMENTUM * self.momentum[part] + gradient
        self.found[part] -= RATE * (gradient + MOMENTUM * self.momentum[part])
        for rank in self.ranks:
            weights = parameters_to_vector(rank.parameters())
            weights[part] = (weights[part] + self.found[part]) / 2
            vector_to_parameters(weights, rank.parameters())


def _batches(trained: Trained, seed: int, num_steps: int, num_ranks: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    x, y = trained.columns()
    order = NUM_VALID + torch.randperm(len(x) - NUM_VALID, generator=torch.Generator().manual_seed(seed))
    for ids in order.split(BATCH)[:num_steps]:
        yield [(x[own], y[own]) for own in ids.chunk(num_ranks)]


@torch.no_grad()
def _end_round(shared: Any, ranks: list[Any], inner: list[Any], outer: torch.optim.Optimizer) -> None:
    for weight, *own in zip(shared.parameters(), *(rank.parameters() for rank in ranks), strict=True):
        weight.grad = weight - torch.stack(own).mean(0)
    outer.step()
    for weight, *own in zip(shared.parameters(), *(rank.parameters() for rank in ranks), strict=True):
        for one in own:
            one.copy_(weight)
    for states in zip(*(one.state.values() for one in inner), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            mean = torch.stack([state[key] for state in states]).mean(0)
            for state in states:
                state[key].copy_(mean)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("entries", nargs="*", metavar="NAME:RATE")
    parser.add_argument("--task", choices=TRAINED, default="teacher")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=450)
    given = parser.parse_args()
    torch.set_num_threads(1)
    steps = 60 if given.quick else given.steps
    found: dict[str, list[float]] = {}
    grid = [f"{name}:{rate}" for name, rates in GRIDS[given.task].items() for rate in rates]
    for entry in given.entries or grid:
        found[entry] = [final_loss(TRAINED[given.task], entry, seed, steps) for seed in range(given.seeds)]
        each = ", ".join(f"{one:.4f}" for one in found[entry])
        print(f"{given.task}, {steps} steps, {entry:<16} {fmean(found[entry]):.4f} ({each})", flush=True)
    if given.out:
        command = f"python bench/links_rates.py --task {given.task} --steps {steps}"
        harness.write(given.out, " ".join([command, *given.entries]), found)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
