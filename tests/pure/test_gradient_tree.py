"""However virtual replicas are dealt out, their gradients are summed in the same order."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from evenstep.distributed.gradient_tree import Gradients, GradientTree, Layout, add, additions_after, nodes_of, total

V = 7
SPLITS = [(0, 7), (0, 4, 7), (0, 3, 7), (0, 1, 2, 3, 4, 5, 6, 7), (0, 5, 5, 7)]


def gradients_of(virtual: int) -> Gradients:
    drawn = torch.randn(3, 5, generator=torch.Generator().manual_seed(virtual)) * 10.0**virtual
    # Backward does not reach the last one in every virtual replica.
    return [drawn[0], drawn[1], drawn[2] if virtual % 3 else None]


def summed(virtual: range, is_known: bool) -> list[Gradients]:
    weights = [torch.zeros(5, requires_grad=True) for _ in range(3)]
    tree = GradientTree(weights, virtual)
    for number in virtual:
        for weight, gradient in zip(weights, gradients_of(number), strict=True):
            weight.grad = gradient
        tree.take([weight.grad for weight in weights] if is_known else None)
        assert all(weight.grad is None for weight in weights)
    return tree.sums


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("ends", SPLITS)
def test_the_sum_has_the_bits_of_one_device(ends: tuple[int, ...], is_known: bool) -> None:
    parts = tuple(range(*pair) for pair in pairwise(ends))
    every = [sums for part in parts for sums in summed(part, is_known)]
    found = total(every, Layout.of(parts))
    alone = total(summed(range(V), False), Layout.of((range(V),)))
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))  # type: ignore[arg-type]


def test_a_device_keeps_as_few_sums_as_it_can() -> None:
    assert additions_after(range(4)) == (0, 1, 0, 2)
    assert additions_after(range(1, 4)) == (0, 0, 1)
    for start in range(8):
        for stop in range(start, 9):
            after = additions_after(range(start, stop))
            assert len(after) - sum(after) == len(nodes_of(range(start, stop)))


def test_gradients_become_a_sum_where_nothing_is_before_them_or_something_is_missing() -> None:
    for is_missing, expected in ((False, [True, False, True, False]), (True, [True, True, True, True])):
        weight = torch.zeros(2, requires_grad=True)
        tree, found = GradientTree([weight], range(4)), []
        for number in range(4):
            weight.grad = None if is_missing and number == 0 else torch.ones(2)
            found.append(tree.keeps_next)
            tree.take()
        assert found == expected
        assert tree.sums[0][0].tolist() == [4.0 - is_missing] * 2  # type: ignore[union-attr]


def test_a_device_that_owns_no_parameter_has_nothing_to_add() -> None:
    assert add([], []) == []
