"""The order in which gradients of virtual replicas are summed: one binary tree over all of them, whatever the devices.

Node k of level 0 is the gradient of virtual replica k. Above, node k is the sum of nodes 2k and 2k + 1 below it, or
node 2k alone where there is no other. A device sums the virtual replicas that it computes as far as they are whole
nodes; what is left is summed over devices, in the same order on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import NoneType
from typing import NamedTuple

import torch

from evenstep.internals import foreach_add_

Gradients = list[torch.Tensor | None]
"""One for each weight; None where backward did not reach it."""


class Node(NamedTuple):
    """One sum: a place in the tree."""

    level: int
    number: int


def nodes_of(virtual: range) -> list[Node]:
    """The fewest nodes that make up a range of virtual replicas, from the first to the last.

    >>> nodes_of(range(0, 4)), nodes_of(range(1, 4))
    ([Node(level=2, number=0)], [Node(level=0, number=1), Node(level=1, number=1)])
    """
    nodes: list[Node] = []
    for number in virtual:
        _push(nodes, Node(0, number))
    return nodes


def _push(nodes: list[Node], node: Node) -> int:
    """Add the next node to a binary counter; returns how many before it became part of it."""
    num = 0
    while nodes and nodes[-1] == (node.level, node.number - 1) and node.number % 2:
        nodes.pop()
        node = Node(node.level + 1, node.number // 2)
        num += 1
    nodes.append(node)
    return num


def additions(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """In which order nodes that make up the whole tree become one: (i, j) adds the j-th to the i-th.

    >>> additions([Node(1, 0), Node(0, 2), Node(0, 3)])
    [(1, 2), (0, 1)]
    """
    here = {node: place for place, node in enumerate(nodes)}
    pairs: list[tuple[int, int]] = []
    level = 0
    while len(here) > 1:
        for node in sorted(node for node in here if node.level == level and node.number % 2 == 0):
            place, other = here.pop(node), here.pop(Node(level, node.number + 1), None)
            if other is not None:
                pairs.append((place, other))
            here[Node(level + 1, node.number // 2)] = place
        level += 1
    return pairs


@dataclass(frozen=True)
class Layout:
    """Which nodes each process or device has, and in which order they become one."""

    nodes: tuple[tuple[Node, ...], ...]
    """Of each."""
    additions: tuple[tuple[int, int], ...]
    """Of nodes, counted from the first of the first to the last of the last."""

    @classmethod
    @cache
    def of(cls, virtual: tuple[range, ...]) -> Layout:
        """For these virtual replicas of each."""
        nodes = tuple(tuple(nodes_of(own)) for own in virtual)
        return cls(nodes, tuple(additions([node for own in nodes for node in own])))

    @property
    def leaves(self) -> list[tuple[int, int]]:
        """For each node, who has it, and which of its nodes it is."""
        return [(who, which) for who, own in enumerate(self.nodes) for which in range(len(own))]

    @property
    def most(self) -> int:
        """Nodes of whoever has the most."""
        return max(map(len, self.nodes))

    @cached_property
    def numbers(self) -> list[int]:
        """As sums.c reads it."""
        leaves = [number for leaf in self.leaves for number in leaf]
        pairs = [number for pair in self.additions for number in pair]
        return [self.most, len(leaves) // 2, *leaves, len(self.additions), *pairs]


def add(left: Gradients, right: Gradients) -> Gradients:
    """The sum, in the memory of the left ones; a gradient that only one side has is that one."""
    if not (_has_gaps(left) or _has_gaps(right)):
        # Of several devices, one may own no parameter.
        if left:
            foreach_add_(left, right)
        return left
    both = [pair for pair in zip(left, right, strict=True) if pair[0] is not None and pair[1] is not None]
    if both:
        foreach_add_([one for one, _ in both], [other for _, other in both])
    return [other if one is None else one for one, other in zip(left, right, strict=True)]


def _has_gaps(gradients: Gradients) -> bool:
    # `None in gradients` would compare tensors.
    return NoneType in map(type, gradients)


@cache
def additions_after(virtual: range) -> tuple[int, ...]:
    """After each of these virtual replicas, how many sums become one with its gradients.

    >>> additions_after(range(0, 4)), additions_after(range(1, 4))
    ((0, 1, 0, 2), (0, 0, 1))
    """
    nodes: list[Node] = []
    return tuple(_push(nodes, Node(0, number)) for number in virtual)


class GradientTree:
    """The sums of what one device has computed so far: a binary counter, of few gradients at a time."""

    def __init__(self, weights: Sequence[torch.Tensor], virtual: range) -> None:
        self._weights = weights
        self._additions = iter(additions_after(virtual))
        self._num_additions = next(self._additions, 0)
        """Of the next virtual replica."""
        self._has_gaps = False
        """Whether a sum may lack a gradient."""
        self.sums: list[Gradients] = []
        """Of each node."""

    @property
    def keeps_next(self) -> bool:
        """Whether gradients of the next virtual replica become a sum, to which others are added in their memory."""
        return not self._num_additions or self._has_gaps

    def take(self, known: Gradients | None = None) -> None:
        """Take the gradients off the weights: they are those of the next virtual replica, `known` or not."""
        weights = self._weights
        gradients: Gradients = [weight.grad for weight in weights] if known is None else known
        for weight in weights:
            weight.grad = None
        if not self._num_additions:
            self._has_gaps = self._has_gaps or _has_gaps(gradients)
        for _ in range(self._num_additions):
            gradients = add(self.sums.pop(), gradients)
        self.sums.append(gradients)
        self._num_additions = next(self._additions, 0)


def total(sums: Iterable[Gradients], layout: Layout) -> Gradients:
    """The sum of all nodes, in the memory of the first."""
    gradients = list(sums)
    for one, other in layout.additions:
        gradients[one] = add(gradients[one], gradients[other])
    return gradients[0]


def give(weights: Sequence[torch.Tensor], gradients: Gradients) -> None:
    """Make these the gradients of the weights."""
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
