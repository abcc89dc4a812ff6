"""Every optimizer of torch, and some of others, on sharded parameters and on whole ones; `optimizer_script.py OUT`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers.optimization import Adafactor as HuggingFaceAdafactor

import evenstep
from evenstep.checkpoint.state_dict import weights, whole
from evenstep.errors import TaskError
from tests.small_tasks import MuonAndAdamW

STEPS = 8
Weights = Iterable[nn.Parameter]


class Lars(Optimizer):
    """A norm of the whole parameter, which torch computes over all ranks."""

    def __init__(self, parameters: Weights, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight -= group["lr"] * self.rate(weight) * weight.grad

    def rate(self, weight: torch.Tensor) -> Any:
        assert weight.grad is not None
        return weight.norm() / weight.grad.norm()


class LarsOfSlices(Lars):
    """The same, in Python's numbers: torch gives each rank the norm of its slice."""

    def rate(self, weight: torch.Tensor) -> Any:
        assert weight.grad is not None
        return float(weight.norm()) / float(weight.grad.norm())


class Coupled(LarsOfSlices):
    """One rate for all parameters, from numbers of each: an update depends on parameters that a rank does not have."""

    def rate(self, weight: torch.Tensor) -> Any:
        return sum(float(one.norm()) for group in self.param_groups for one in group["params"])


class Counting(Lars):
    """A rate that depends on counts of steps, which a group and a parameter keep, in Python's numbers."""

    def __init__(self, parameters: Weights, lr: float = 0.01) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["num_steps"] = 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num_steps"] += 1
            for weight in group["params"]:
                state = self.state[weight]
                state["own_steps"] = state.get("own_steps", 0) + 1
                state["rate"] = float(weight.norm()) / group["num_steps"] / state["own_steps"]
                state["nothing"], state["is_begun"] = None, True
        super().step()

    def rate(self, weight: torch.Tensor) -> Any:
        return self.state[weight]["rate"]


class Keeping(Lars):
    """Keeps what cannot be sent."""

    def rate(self, weight: torch.Tensor) -> Any:
        self.state[weight]["history"] = []
        return float(weight.norm())


class Changing(Lars):
    """Keeps something new after some steps, of a parameter that one rank updates."""

    def rate(self, weight: torch.Tensor) -> Any:
        state = self.state[weight]
        state["num"] = state.get("num", 0) + 1
        if state["num"] > 2 and weight.ndim == 4:
            state["new"] = 1.0
        return float(weight.norm())


class Failing(Lars):
    """Fails after some steps, where one rank updates a parameter."""

    def rate(self, weight: torch.Tensor) -> Any:
        state = self.state[weight]
        state["num"] = state.get("num", 0) + 1
        if state["num"] > 2 and weight.ndim == 4 and self.param_groups[0]["params"] == [weight]:
            raise ValueError("not again")
        return float(weight.norm())


class Noisy(Lars):
    """It has no one result to compare with."""

    def rate(self, weight: torch.Tensor) -> Any:
        return torch.rand_like(weight)


def matrices(parameters: Weights) -> Optimizer:
    return torch.optim.Muon([one for one in parameters if one.ndim == 2], lr=0.01)


OF_TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
MAKE: dict[str, Callable[[Weights], Optimizer]] = {
    **{name: lambda parameters, kind=kind: kind(parameters, lr=0.01) for name, kind in OF_TORCH.items()},
    "Muon": matrices,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=True),
    "one by one": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False, amsgrad=True),
    "Adafactor of Hugging Face": HuggingFaceAdafactor,
    "Lars": Lars,
    "LarsOfSlices": LarsOfSlices,
    "Coupled": Coupled,
    "Counting": Counting,
    "Keeping": Keeping,
    "Changing": Changing,
    "Failing": Failing,
    "MuonAndAdamW": MuonAndAdamW,
    "Noisy": Noisy,
}
TWO = "Muon and AdamW, one after the other"
X = torch.randn(9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(9) % 3


class Net(nn.Module):
    """Units and parameters outside of them, of one, two and four dimensions; two ranks cannot halve any."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        self.pixels = nn.Conv2d(1, 3, (1, 6))
        self.scale = nn.Parameter(torch.ones(1))
        self.names = nn.Embedding(3, 3, sparse=is_sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        named = self.names((x[:, 0] > 0).long())
        found: torch.Tensor = self.scale * self.layers(x) + self.pixels(x[:, None, None])[:, :, 0, 0] + named
        return found


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def muon_and_adamw(parameters: Weights) -> list[Optimizer]:
    every = list(parameters)
    rest = [one for one in every if one.ndim != 2]
    return [matrices(every), torch.optim.AdamW(rest, lr=0.01)]


def made(name: str, parameters: Weights) -> list[Optimizer]:
    """The optimizers of one model."""
    return muon_and_adamw(parameters) if name == TWO else [MAKE[name](parameters)]


def net(name: str) -> Net:
    torch.manual_seed(1)
    return Net(is_sparse=name == "SparseAdam").double()


def on_one_device(name: str) -> dict[str, torch.Tensor]:
    model = net(name)
    optimizers = made(name, model.parameters())
    for _ in range(STEPS):
        model.zero_grad()
        loss(model, (X, Y)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.state_dict()


def together(name: str, team: evenstep.Team, folder: Path) -> dict[str, torch.Tensor]:
    spread = team.wrap(net(name))
    optimizers = made(name, spread.parameters())
    calls: list[str] = []
    for optimizer in optimizers:
        team.check(optimizer)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    loader = team.loader((X, Y), batch=len(X), shuffle=False)
    run = evenstep.Run(team, spread, optimizers[0], loader)
    while loader.num_finished < STEPS:
        for batch in loader:
            team.backward(loss, spread, batch)
            for optimizer in optimizers:
                team.step(optimizer)
        if loader.num_finished == STEPS // 2 and name != TWO:
            # Into an optimizer that has taken steps; a Run has one for each model.
            run.load(run.save(folder / name.replace(" ", "-")))
    assert calls == ["before", "after"] * STEPS * len(optimizers)
    found = {name: whole(value, keep=True) for name, value in weights(spread.module).items()}
    return {name: value for name, value in found.items() if value is not None}


def outcome(name: str, team: evenstep.Team, folder: Path) -> str | float:
    """Why it was refused, or how far it ends from one device."""
    try:
        ours = together(name, team, folder)
    except TaskError as error:
        return str(error)
    reference = on_one_device(name)
    return max(float((ours[key] - one).abs().max() / one.abs().max()) for key, one in reference.items())


if __name__ == "__main__":
    team = evenstep.join("fsdp", devices=("cpu", "cpu"), precision="fp64")
    folder = Path(sys.argv[1])
    found = {name: outcome(name, team, folder) for name in (*MAKE, TWO)}
    (folder / f"{team.world.rank}.json").write_text(json.dumps(found))
