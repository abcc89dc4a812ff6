"""Fused updates of slices: what a card gets to do, and that it comes to the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from evenstep.strategies.base import update
from evenstep.training import fused_optimizer, optimizer_step
from evenstep.training.fused_optimizer import MOST, FusedAdam, Sliced, cut, slice_length
from evenstep.training.optimizer_step import UpdateSettings, step_optimizer

CPU = torch.device("cpu")
KINDS = {
    "Adam": lambda weights: Adam(weights, lr=0.01, fused=True),
    "amsgrad": lambda weights: Adam(weights, lr=0.01, fused=True, amsgrad=True),
    "AdamW": lambda weights: AdamW(weights, lr=0.01, fused=True),
    "SGD": lambda weights: SGD(weights, lr=0.01, fused=True),
    "momentum": lambda weights: SGD(weights, lr=0.01, fused=True, momentum=0.9),
}


def made() -> list[torch.nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    shapes = [(300, 70), (7,), (), (64, 3, 5, 5), (40, 2000)]
    weights = [torch.nn.Parameter(torch.randn(shape, generator=draws)) for shape in shapes]
    weights[3] = torch.nn.Parameter(weights[3].detach().to(memory_format=torch.channels_last))
    weights[4] = torch.nn.Parameter(weights[4].detach().t())
    return weights


def descend(optimizer: Optimizer, weights: list[torch.nn.Parameter], is_sliced: bool) -> list[torch.Tensor]:
    for number in range(3):
        for weight in weights:
            weight.grad = torch.sin(weight.detach() * (number + 1))
        if is_sliced:
            with Sliced():  # type: ignore[no-untyped-call]
                optimizer.step()
        else:
            optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("kind", KINDS)
def test_slices_end_where_whole_tensors_end(kind: str) -> None:
    one, other = made(), made()
    sliced = descend(KINDS[kind](one), one, True)
    whole = descend(KINDS[kind](other), other, False)
    assert all(map(torch.equal, sliced, whole))


def test_all_numbers_are_in_one_slice_each_and_steps_go_with_them() -> None:
    weights = made()
    steps = [torch.tensor(float(number)) for number in range(len(weights))]
    cut_up, empty, of_steps = cut((list(weights), [], steps))
    assert len(weights) < len(cut_up) == len(of_steps) <= MOST
    assert empty == []
    assert sum(one.numel() for one in cut_up) == sum(one.numel() for one in weights)
    for step, weight in zip(steps, weights, strict=True):
        found = [one for one, of_step in zip(cut_up, of_steps, strict=True) if of_step is step]
        assert sum(one.numel() for one in found) == weight.numel()
        assert found[0].data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("sizes", [[], [10] * 40, [10**9]])
def test_where_slices_win_nothing_there_are_none(sizes: list[int]) -> None:
    assert slice_length(sizes) == 0


def test_a_gradient_that_lies_in_another_order_is_left_whole() -> None:
    weight = torch.randn(300, 200)
    lists = ([weight], [weight.t().contiguous().t()])
    assert [len(one) for one in cut(lists)] == [1, 1]


@pytest.mark.parametrize("kind", ["Adam", "amsgrad", "AdamW", "two groups"])
def test_lists_that_are_made_once_end_where_torch_ends(kind: str) -> None:
    groups = {**KINDS, "two groups": lambda weights: AdamW([{"params": [one]} for one in weights], fused=True)}
    one, other = made(), made()
    ours, theirs = groups[kind](one), groups[kind](other)
    flag = torch.zeros(())
    quick = FusedAdam(CPU, flag)
    taken = []
    for number in range(6):
        for weight in (*one, *other):
            weight.grad = torch.sin(weight.detach() * (number + 1))
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        taken.append(quick.step(ours))
        if not taken[-1]:
            ours.step()
        theirs.step()
    # The first step makes what the lists hold.
    assert taken == [False] + [True] * 5
    assert all(map(torch.equal, one, other))
    before = [torch.clone(held) for held in held_by(ours)]
    assert all(map(torch.equal, before, held_by(theirs)))
    flag.fill_(1)
    assert quick.step(ours)
    assert all(map(torch.equal, before, held_by(ours)))
    assert all(map(torch.equal, one, other))


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def test_torch_takes_the_step_where_a_weight_has_no_gradient_and_after_a_change() -> None:
    weights = made()
    optimizer = AdamW(weights, fused=True)
    quick = FusedAdam(CPU, torch.zeros(()))
    descend(optimizer, weights, False)
    assert quick.step(optimizer)
    weights[1].grad = None
    assert not quick.step(optimizer)
    weights[1].grad = torch.ones(7)
    optimizer.load_state_dict(optimizer.state_dict())
    assert quick.step(optimizer)
    assert float(optimizer.state[weights[0]]["step"]) == 5
    assert not FusedAdam(CPU).step(SGD(weights, fused=True))


def other_tensors(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.ones_like(state["exp_avg"])


def other_states(optimizer: Optimizer) -> None:
    for weight, state in optimizer.state.items():
        optimizer.state[weight] = {name: value + 1 for name, value in state.items()}


def other_weights(optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    group["params"] = group["params"][1:]


def one_more_group(optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    taken, group["params"] = group["params"][:1], group["params"][1:]
    optimizer.add_param_group({"params": taken, "lr": 0.5})


def loaded(optimizer: Optimizer) -> None:
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"].fill_(0.5)
    optimizer.load_state_dict(saved)


def no_gradient(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"][1].grad = None


def option(**values: object) -> Callable[[Optimizer], None]:
    return lambda optimizer: optimizer.param_groups[0].update(values)


def hooked(optimizer: Optimizer) -> None:
    def halve(optimizer: Optimizer, *_: object) -> None:
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad /= 2

    optimizer.register_step_pre_hook(halve)


def own_step(optimizer: Optimizer) -> None:
    inner = optimizer.step
    optimizer.step = lambda: option(lr=0.5)(optimizer) or inner()


CHANGES = {
    "nothing": lambda optimizer: None,
    "tensors of the state": other_tensors,
    "the states": other_states,
    "the weights": other_weights,
    "a group more": one_more_group,
    "a state that was saved": loaded,
    "no gradient": no_gradient,
    "a rate": option(lr=0.5),
    "a rate as a tensor": option(lr=torch.tensor(0.5)),
    "betas": option(betas=(0.5, 0.6)),
    "decay": option(weight_decay=0.1),
    "maximize": option(maximize=True),
    "no fused kernel": option(fused=False),
    "a hook": hooked,
    "a step of its own": own_step,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["Adam", "amsgrad"])
def test_a_change_between_two_steps_is_seen_in_the_next(kind: str, change: str) -> None:
    one, other = made(), made()
    ours, theirs = KINDS[kind](one), KINDS[kind](other)
    settings = UpdateSettings(adam=FusedAdam(CPU))
    for number in range(6):
        for weight in (*one, *other):
            weight.grad = torch.sin(weight.detach() * (number + 1))
        if number == 3:
            for optimizer in (ours, theirs):
                CHANGES[change](optimizer)
        step_optimizer(ours, None, settings)
        theirs.step()
    assert all(map(torch.equal, one, other))
    assert all(map(torch.equal, held_by(ours), held_by(theirs)))


@pytest.mark.parametrize(("kind", "is_quick"), [("Adam", True), ("amsgrad", True), ("AdamW", True), ("SGD", False)])
def test_torch_is_not_called_for_a_step_that_needs_nothing_of_it(
    kind: str, is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = made()
    optimizer = KINDS[kind](weights)
    settings = UpdateSettings(adam=FusedAdam(CPU))
    calls: list[int] = []
    monkeypatch.setattr(optimizer_step, "update", lambda optimizer: calls.append(1) or update(optimizer))
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        step_optimizer(optimizer, None, settings)
    # The first step makes the state.
    assert len(calls) == (1 if is_quick else 4)


def test_lists_that_cannot_be_made_are_not_tried_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = made()
    optimizer = AdamW(weights, fused=True)
    tried: list[int] = []
    make = fused_optimizer._adam_lists
    monkeypatch.setattr(fused_optimizer, "_adam_lists", lambda *words: tried.append(1) or make(*words))
    quick = FusedAdam(CPU, torch.zeros(()))
    for weight in weights[:-1]:
        weight.grad = torch.ones_like(weight)
    for _ in range(4):
        assert not quick.step(optimizer)
        optimizer.step()
    # Before the first step, and when there is a state.
    assert len(tried) == 2
    quick.recheck()
    assert not quick.step(optimizer)
    assert len(tried) == 3
    weights[-1].grad = torch.ones_like(weights[-1])
    assert not quick.step(optimizer)
    optimizer.step()
    assert quick.step(optimizer)
    assert len(tried) == 4
