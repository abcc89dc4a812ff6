"""Optimizers and layers that a team cannot train are refused before the start; trying that leaves no trace."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import evenstep
from evenstep.errors import TaskError
from evenstep.sampling.rng import is_same_state, rng_states
from evenstep.training.optimizer_compatibility import Rehearsal, refuse_closure
from evenstep.training.whole_matrix_update import rounds


class Sharp(Optimizer):
    """As sharpness-aware minimisation is written: it needs the gradients at two places, and a closure for that."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "give a closure"
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(weight.grad)
        torch.enable_grad()(closure)()
        self.base.step()


def task(model: Any = lambda: nn.Linear(4, 2), optimizer: Any = lambda parameters: SGD(parameters, lr=0.1)) -> Any:
    data = torch.randn(20, 4), torch.arange(20) % 2
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return evenstep.Task(model=model, train=data, loss=loss, optimizer=optimizer, batch=5, epochs=1)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharp])
def test_one_that_needs_a_closure_is_refused_before_the_start(kind: Any) -> None:
    with pytest.raises(TaskError, match=f"{kind.__name__}.step needs a closure that computes the loss again"):
        evenstep.train(task(optimizer=lambda parameters: kind(parameters, lr=0.1)))
    assert not Path("runs").exists()


def test_in_a_loop_of_the_users_own_it_is_refused_at_the_first_step() -> None:
    team = evenstep.join("single")
    model = team.wrap(nn.Linear(4, 2))
    with pytest.raises(TaskError, match=r"LBFGS\.step needs a closure"):
        team.step(torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("layer", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)], ids=["layer", "statistics"])
def test_layers_without_a_shape_are_refused_with_the_line_to_write(layer: nn.Module) -> None:
    with pytest.raises(TaskError, match=r"0 \(Lazy\w+\) has no shape before its first forward.*\n.*net\(torch.zeros"):
        evenstep.train(task(model=lambda: nn.Sequential(layer)))
    with pytest.raises(TaskError, match="has no shape before its first forward"):
        evenstep.join("single").wrap(layer)


def test_layers_that_got_their_shape_where_the_model_is_made_are_trained() -> None:
    def model() -> nn.Module:
        net = nn.Sequential(nn.LazyLinear(5), nn.LazyLinear(2))
        net(torch.zeros(1, 4))
        return net

    assert len(evenstep.train(task(model=model)).steps) == 4


def moves(optimizer: Optimizer) -> list[float]:
    return [float(one.abs().max()) for one in Rehearsal(optimizer).moved()]


def test_a_rehearsal_leaves_the_optimizer_and_its_parameters_as_they_are() -> None:
    weights = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(7, 2)), nn.Parameter(torch.ones(3))]
    optimizer = AdamW(weights, lr=0.1)
    # It begins with a learning rate of 0, and wraps the step.
    LambdaLR(optimizer, lambda step: step / 10)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    of_all = [
        register(lambda *_: called.append(2))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    refuse_closure(optimizer)
    first, second = moves(optimizer), moves(optimizer)
    assert first == second
    assert len(first) == 3  # two of two dimensions, one of one
    assert min(first) > 0
    assert called == []
    SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert called == [2, 2]
    for handle in of_all:
        handle.remove()
    assert not optimizer.state
    assert all(torch.equal(weight, torch.ones_like(weight)) and weight.grad is not None for weight in weights)


class Noisy(SGD):
    """As Langevin dynamics are written: every update has noise of its own."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad += torch.randn_like(weight) * random.random() * np.random.rand()
        super().step()


def test_a_rehearsal_leaves_random_numbers_as_they_are() -> None:
    optimizer = Noisy([nn.Parameter(torch.ones(3, 4))], lr=0.1)
    before = rng_states()
    refuse_closure(optimizer)
    first, again = (Rehearsal(optimizer).moved(seed=1) for _ in range(2))
    (other,) = Rehearsal(optimizer).moved(seed=2)
    assert is_same_state(before, rng_states())
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other)


def test_a_step_that_wants_another_argument_is_not_said_to_need_a_closure() -> None:
    class Scaled(SGD):
        def step(self, scale: Any) -> None:  # type: ignore[override]
            super().step()

    refuse_closure(Scaled([nn.Parameter(torch.ones(3, 4))], lr=0.1))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 5))
def test_in_a_round_no_rank_has_more_whole_numbers_than_the_largest_parameter(sizes: list[int], ranks: int) -> None:
    found = rounds(sizes, ranks)
    assert sorted(index for owned in found for of_rank in owned for index in of_rank) == list(range(len(sizes)))
    assert all(len(owned) == ranks for owned in found)
    assert max(sum(sizes[index] for index in of_rank) for owned in found for of_rank in owned) == max(sizes)


def test_what_an_optimizer_keeps_from_its_making_on_is_there_in_a_rehearsal() -> None:
    assert min(moves(torch.optim.Adagrad([nn.Parameter(torch.ones(3, 4))], lr=0.1))) > 0


def test_an_optimizer_around_another_one_is_rehearsed_with_it() -> None:
    class Around(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

        def step(self, closure: None = None) -> None:
            self.inner.step()

    weight = nn.Parameter(torch.ones(3, 4))
    assert moves(Around(SGD([weight], lr=0.1))) == moves(SGD([weight], lr=0.1))
    assert torch.equal(weight, torch.ones(3, 4))
