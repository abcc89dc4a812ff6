"""What becomes of gradients before they are averaged: in which order they lie, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from evenstep.distributed.world import World
from evenstep.errors import TaskError, TrainingError
from evenstep.strategies.ddp import Averaging, can_average


def alone() -> World:
    return World(0, 1, (torch.device("cpu"),))


class Halves:
    """A channel whose other process has only zeros."""

    def __init__(self) -> None:
        self.num_tensors: list[int] = []

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        assert len({tensor.dtype for tensor in tensors}) == 1
        self.num_tensors.append(len(tensors))
        for tensor in tensors:
            tensor.mul_(0.5)


class Interrupted(Halves):
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        raise KeyboardInterrupt


def step(averaging: Averaging, model: nn.Module, x: torch.Tensor) -> None:
    with averaging:
        model(x).sum().backward()


def test_all_gradients_of_a_type_are_averaged_at_once_in_whatever_order_they_lie() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(4, 2, 3, 3)
    model(x).sum().backward()
    right = [weight.grad.clone() / 2 for weight in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    channel = Halves()
    step(Averaging(channel, model, alone()), model, x)
    assert all(map(torch.equal, (weight.grad for weight in model.parameters()), right))
    # One more number says that this rank lacks no gradient.
    assert channel.num_tensors == [4 + 1]


def test_each_type_by_itself() -> None:
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2).double()])
    channel = Halves()
    with Averaging(channel, model, alone()):
        model[0](torch.ones(1, 3)).sum().backward()
        model[1](torch.ones(1, 3).double()).sum().backward()
    assert channel.num_tensors == [2 + 1, 2]


def test_a_gradient_put_in_another_order_is_put_right() -> None:
    model = nn.Linear(3, 4)
    channel = Halves()
    with Averaging(channel, model, alone()):
        model(torch.ones(1, 3)).sum().backward()
        model.weight.grad = model.weight.grad.t().contiguous().t()  # type: ignore[union-attr]
    assert model.weight.grad.stride() == model.weight.stride()
    assert torch.equal(model.weight.grad, torch.full((4, 3), 0.5))


class TwoRanks(Halves):
    """A channel whose other process used all parameters, and has ones."""

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        super().average(tensors)
        is_list = len(self.num_tensors) > 1
        for tensor in tensors if is_list else tensors[:-1]:
            tensor.add_(0.5)


@pytest.mark.parametrize("channel", [Halves(), TwoRanks()], ids=["no rank", "one rank"])
def test_a_gradient_that_a_rank_lacks_is_that_of_the_others_or_none(channel: Halves) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "spare": nn.Linear(3, 2)})
    averaging = Averaging(channel, model, alone())
    step(averaging, model["used"], torch.ones(1, 3))
    if isinstance(channel, TwoRanks):
        assert torch.equal(model["spare"].weight.grad, torch.full((2, 3), 0.5))
        assert "spare.weight, spare.bias" in averaging.note.lines[0]
    else:
        assert model["spare"].weight.grad is None
        assert "no gradient reaches spare.weight, spare.bias (2 of 4 parameters)" in averaging.note.lines[0]
    assert channel.num_tensors == [4 + 1, 1]


def test_a_gradient_of_another_type_is_refused() -> None:
    model = nn.Linear(3, 2, bias=False).to(torch.bfloat16)
    if not hasattr(model.weight, "grad_dtype"):
        pytest.skip("this torch has no gradients of another type")
    model.weight.grad_dtype = torch.float32
    with (
        pytest.raises(TaskError, match=r"the gradient of weight is torch\.float32 and its weight torch\.bfloat16"),
        Averaging(Halves(), model, alone()),
    ):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()


def test_an_average_that_was_left_in_the_middle_is_the_last() -> None:
    model = nn.Linear(3, 2)
    averaging = Averaging(Interrupted(), model, alone())
    with pytest.raises(KeyboardInterrupt):
        step(averaging, model, torch.ones(1, 3))
    with pytest.raises(TrainingError, match="was interrupted"):
        step(averaging, model, torch.ones(1, 3))


def test_nothing_is_sent_while_communication_is_off_nor_after_an_error() -> None:
    model, world, channel = nn.Linear(3, 2), alone(), Halves()
    world.communication.is_off = True
    step(Averaging(channel, model, world), model, torch.ones(1, 3))
    with pytest.raises(RuntimeError):
        step(Averaging(channel, model, alone()), model, torch.ones(1, 4))
    assert channel.num_tensors == []


@pytest.mark.parametrize(
    ("model", "can"),
    [
        (nn.Linear(3, 2), True),
        (nn.Linear(3, 2).bfloat16(), True),
        (nn.Linear(3, 2).half(), False),
        (nn.Embedding(3, 2, sparse=True), False),
        (nn.LazyLinear(2), False),
    ],
    ids=["fp32", "bf16", "fp16", "sparse", "lazy"],
)
def test_what_can_be_averaged(model: nn.Module, can: bool) -> None:
    assert can_average(model) == can
