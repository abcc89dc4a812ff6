"""The order in which gradients of virtual replicas are summed: one binary tree over all of them, whatever the devices.

Node k of level 0 is the gradient of virtual replica k. Above, node k is the sum of nodes 2k and 2k + 1 below it, or
node 2k alone where there is no other. A device sums the virtual replicas that it computes as far as they are whole
nodes; what is left is summed over devices, in the same order on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import NoneType
from typing import NamedTuple

import torch
from torch.autograd.graph import Node as GraphNode

from evenstep.errors import TaskError
from evenstep.private_apis import current_graph_task, foreach_add_, has_accumulation_hooks, version_of

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
        """As allreduce.c reads it."""
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
        self._num_additions, self._after_next = next(self._additions, 0), next(self._additions, 0)
        """Of the next virtual replica, and of the one after it."""
        self._has_gaps = False
        """Whether a sum may lack a gradient."""
        self.sums: list[Gradients] = []
        """Of each node."""

    @property
    def keeps_next(self) -> bool:
        """Whether gradients of the next virtual replica become a sum, to which others are added in their memory."""
        return not self._num_additions or self._has_gaps

    @property
    def joins_next(self) -> bool:
        """Whether the next virtual replica and the one after it become one sum, before any other."""
        return not self._num_additions and self._after_next > 0

    def leave(self) -> None:
        """Leave the gradients of the next virtual replica with the weights: the backward after it adds to them."""
        self._advance()
        self._num_additions -= 1

    def _advance(self) -> None:
        self._num_additions, self._after_next = self._after_next, next(self._additions, 0)

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
        self._advance()


class BackwardSums:
    """Two neighbours of the tree summed by the backward of the second, in the gradients of the first.

    That is one pass over the gradients less, and the same sum, if a backward adds to every gradient once. In the first
    step this is counted. Reentrant checkpointing adds in parts: (a + b) + c, where the tree adds a + (b + c). It may
    begin to do so later; so a model that uses it is left alone: a checkpoint runs a backward inside the backward.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = weights
        self._is_possible = True
        self._is_known = [False] * len(weights)
        """For each gradient, whether a backward was seen to add to it."""
        self._looks_next = True
        self._nodes: list[GraphNode] = []
        """What is looked at in this step."""
        self._num_added: list[int] = []
        """To each gradient, by the last backward that was looked at."""
        self._task: int | None = None
        """The first of the engine's tasks in that backward."""

    def start(self) -> None:
        """Before the virtual replicas of a step."""
        self._nodes.clear()
        # Hooks would be called with sums, and with other ones on other devices.
        self._is_possible = self._is_possible and not has_accumulation_hooks(self._weights)
        if self._looks_next and self._is_possible:
            self._looks_next = False
            # Hooks of tensors make every later backward slower, removed or not; these nodes are gone after the step.
            for index, weight in enumerate(self._weights):
                if weight.requires_grad:
                    self._nodes.append(_accumulator(weight))
                    self._nodes[-1].register_prehook(partial(self._count, index))

    def _count(self, index: int, _: object) -> None:
        self._num_added[index] += 1
        self._is_known[index] = True
        task = current_graph_task()
        self._task = task if self._task is None else self._task
        self._is_possible = self._is_possible and self._num_added[index] == 1 and task == self._task

    def begin(self) -> None:
        """Before a backward."""
        if self._nodes:
            self._num_added, self._task = [0] * len(self._weights), None

    def leave(self, gradients: Gradients) -> list[int] | None:
        """How often each of these was changed so far, if the next backward may add to them; None if not."""
        if not self._is_possible or self._nodes:
            return None
        for gradient, is_known in zip(gradients, self._is_known, strict=True):
            if gradient is None:
                continue
            if not is_known:
                # It was frozen so far.
                self._looks_next = True
                return None
            if gradient.untyped_storage().nbytes() != gradient.nbytes:
                # Backward of `torch.cat` gives parameters parts of one storage, whose changes are counted together.
                return None
        return [-1 if gradient is None else version_of(gradient) for gradient in gradients]

    def check(self, left: list[int]) -> None:
        """After the backward that added to what was left."""
        for weight, before in zip(self._weights, left, strict=True):
            if before >= 0 and version_of(weight.grad) > before + 1:  # type: ignore[arg-type]
                raise TaskError(
                    "the backward of this step added more than once to the gradient of a parameter of shape "
                    f"{tuple(weight.shape)}, and that of the first step did not, so their sum would not be "
                    "bit-identical on other devices; if the loss uses torch.utils.checkpoint now and then, give it "
                    "use_reentrant=False"
                )


def _accumulator(weight: torch.Tensor) -> GraphNode:
    """The node of backward that adds to the weight's gradient."""
    with torch.enable_grad():
        grad_fn = weight.view_as(weight).grad_fn
    assert grad_fn is not None
    node = grad_fn.next_functions[0][0]
    assert node is not None
    return node


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
