"""An update without what torch wraps around it: the same weights, and nobody who listens is passed over."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook

from evenstep.strategies.base import SeparateGradients, separate, update

KINDS = (SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 5))


def descend(optimizer: Optimizer, parameter: torch.nn.Parameter, directly: bool) -> torch.Tensor:
    for number in range(4):
        parameter.grad = torch.sin(parameter.detach() * (number + 1))
        if directly:
            update(optimizer)
        else:
            optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_ends_where_the_whole_step_ends_bit_for_bit(kind: type[Optimizer]) -> None:
    one, other = weight(), weight()
    assert torch.equal(
        descend(kind([one], lr=0.1), one, True),  # type: ignore[call-arg]
        descend(kind([other], lr=0.1), other, False),  # type: ignore[call-arg]
    )
    assert one.grad_fn is None
    assert torch.is_grad_enabled()


def test_hooks_are_called() -> None:
    parameter = weight()
    optimizer = SGD([parameter], lr=0.1)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    descend(optimizer, parameter, True)
    assert called == ["before", "after"] * 4


def test_hooks_on_all_optimizers_are_called() -> None:
    parameter = weight()
    called: list[str] = []
    hook = register_optimizer_step_post_hook(lambda *_: called.append("after"))
    try:
        descend(SGD([parameter], lr=0.1), parameter, True)
    finally:
        hook.remove()
    assert called == ["after"] * 4


def test_a_scheduler_knows_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = weight()
    optimizer = SGD([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    # The whole step opens a range for the profiler; this one must not.
    monkeypatch.setattr(torch.autograd.profiler, "record_function", pytest.fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        descend(optimizer, parameter, True)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class Twice(SGD):
    """A step of the user's own."""

    def step(self, closure: None = None) -> None:
        super().step()
        super().step()


def test_a_step_of_the_users_own_is_taken_as_it_is() -> None:
    one, other = weight(), weight()
    descend(Twice([one], lr=0.1), one, True)
    descend(Twice([other], lr=0.1), other, False)
    assert torch.equal(one, other)
    third = weight()
    assert not torch.equal(one, descend(SGD([third], lr=0.1), third, True))


def test_a_step_put_on_the_optimizer_itself_is_called() -> None:
    parameter = weight()
    optimizer = SGD([parameter], lr=0.1)
    called: list[int] = []
    optimizer.step = lambda: called.append(1)  # type: ignore[assignment,method-assign]
    descend(optimizer, parameter, True)
    assert called == [1] * 4


def test_a_step_that_was_wrapped_is_called_with_its_wrapping(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = weight()
    called: list[int] = []
    whole = SGD.step

    @functools.wraps(whole)
    def told(self: SGD) -> None:
        called.append(1)
        whole(self)

    optimizer = SGD([parameter], lr=0.1)
    descend(optimizer, parameter, True)
    assert called == []
    monkeypatch.setattr(SGD, "step", told)
    descend(optimizer, parameter, True)
    assert called == [1] * 4


def test_a_profiler_sees_its_range() -> None:
    parameter = weight()
    optimizer = SGD([parameter], lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        descend(optimizer, parameter, True)
    assert "Optimizer.step#SGD.step" in {event.name for event in profiler.events() or []}


class Slow(Optimizer):
    """Around another one, as many are written: torch's constructor is not called."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: None = None) -> None:
        self.inner.step()


def test_an_optimizer_around_another_one_is_called() -> None:
    one, other = weight(), weight()
    descend(Slow(SGD([one], lr=0.1)), one, True)
    assert torch.equal(one, descend(SGD([other], lr=0.1), other, False))


def test_a_step_that_belongs_to_another_optimizer_moves_that_ones_weights() -> None:
    one, other = weight(), weight()
    inner, outer = SGD([one], lr=0.1), SGD([other], lr=0.1)
    outer.step = inner.step  # type: ignore[method-assign]
    one.grad = other.grad = torch.ones(5)
    update(outer)
    assert torch.equal(other, weight())
    assert not torch.equal(one, weight())


@pytest.mark.parametrize("how", ["same", "inside", "apart"])
def test_gradients_that_share_memory_get_one_each(how: str) -> None:
    memory = torch.arange(10.0)
    first, second = {"same": (memory[:5], memory[:5]), "inside": (memory, memory[3:8]), "apart": memory.split(5)}[how]
    weights = [torch.zeros(len(first), requires_grad=True), torch.zeros(len(second), requires_grad=True)]
    weights[0].grad, weights[1].grad = first, second
    separate(weights)
    assert all(torch.equal(one.grad, right) for one, right in zip(weights, (first, second), strict=True))  # type: ignore[arg-type]
    for one in weights:
        assert one.grad is not None
        one.grad += 1
    assert [float(one.grad[-1]) - float(right) for one, right in zip(weights, LAST[how], strict=True)] == [1.0, 1.0]  # type: ignore[index]


LAST = {"same": (4, 4), "inside": (9, 7), "apart": (4, 9)}
"""The last number of each, before 1 was added."""


def test_gradients_that_come_to_share_memory_later_are_found() -> None:
    weights = [torch.zeros(5, requires_grad=True) for _ in range(2)]
    look = SeparateGradients(weights)
    apart, together = torch.ones(10), torch.ones(5)
    for shared in (False, False, True, False, True):
        for weight, part in zip(weights, (together, together) if shared else apart.split(5), strict=True):
            weight.grad = part
        look()
        assert len({weight.grad.data_ptr() for weight in weights}) == 2  # type: ignore[union-attr]
