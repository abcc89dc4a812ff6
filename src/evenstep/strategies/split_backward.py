"""A backward in two halves: gradients of what a stage received first, those of its weights later.

The rank before waits for the first half alone. In it, the gradients that reach each operation with weights are kept;
the second half continues there, so that nothing is computed twice. Weights that several operations use, or one whose
backward is written in Python, get their gradients in the first half.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

SHARED = 2
"""Operations that use a weight, from which on it is not left for later."""


class SplitBackward:
    """The graph of one micro-batch, from the output of a stage to what the stage received."""

    def __init__(self, output: torch.Tensor, received: torch.Tensor) -> None:
        self._output, self._received = output, received
        weights, self._is_path = weights_on_path(output, received)
        uses: dict[torch.Tensor, int] = {}
        for one in (weight for of_node in weights.values() for weight in of_node):
            uses[one] = uses.get(one, 0) + 1
        # A backward in Python may change what it saved: it runs once.
        for node in weights:
            if isinstance(node, BackwardCFunction):
                uses.update(dict.fromkeys(weights[node], SHARED))
        # From one use of a weight, backward would also come to the others.
        self._shared = [weight for weight, num in uses.items() if num >= SHARED]
        found = {node: [one for one in of_node if uses[one] < SHARED] for node, of_node in weights.items()}
        self._later = {node: of_node for node, of_node in found.items() if of_node}
        self._arrived: dict[Node, tuple[Any, ...]] = {}

    def of_inputs(self, gradient: torch.Tensor) -> None:
        """Give `received` its gradient; where nothing leads to it, the weights get theirs at once."""
        if not self._is_path:
            torch.autograd.backward([self._output], [gradient])
            return
        hooks = [node.register_prehook(self._keeping(node)) for node in self._later]
        try:
            inputs = [self._received, *self._shared]
            torch.autograd.backward([self._output], [gradient], retain_graph=True, inputs=inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def _keeping(self, node: Node) -> Any:
        return lambda gradients: self._arrived.__setitem__(node, gradients)

    def of_weights(self) -> None:
        """Give the weights theirs, and let go of the graph."""
        while self._later:
            node, weights = self._later.popitem()
            self._continue(node, weights)
        del self._output, self._received

    def _continue(self, node: Node, weights: list[torch.Tensor]) -> None:
        kept = self._arrived.pop(node, ())
        arrived = [(at, one) for at, one in enumerate(kept) if one is not None]
        if not arrived:
            return
        edges = [GradientEdge(node, at) for at, _ in arrived]
        # Hooks on tensors have changed what was kept, and run again before this one, which undoes that.
        again = node.register_prehook(lambda _: kept)
        try:
            torch.autograd.backward(edges, [one for _, one in arrived], retain_graph=True, inputs=weights)
        finally:
            again.remove()


def weights_on_path(output: torch.Tensor, received: torch.Tensor) -> tuple[dict[Node, list[torch.Tensor]], bool]:
    """For each operation between `received` and `output`, the weights that come in beside the path; if there is one."""
    start, end = (torch.autograd.graph.get_gradient_edge(one).node for one in (output, received))
    order = list(_inputs_first(start))
    leads = {end}
    found: dict[Node, list[torch.Tensor]] = {}
    leaves: dict[Node, dict[torch.Tensor, None]] = {}
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        leads |= {node} if any(child in leads for child in children) else set()
        beside = [leaf for child in children if child not in leads for leaf in leaves[child]]
        weight = getattr(node, "variable", None)
        leaves[node] = dict.fromkeys(beside if weight is None else [weight])
        if node in leads and beside:
            found[node] = list(leaves[node])
    return found, start in leads


def _inputs_first(start: Node) -> Iterator[Node]:
    """All operations that lead to this one, each after those that it needs."""
    seen, stack = {start}, [(start, iter(start.next_functions))]
    while stack:
        node, children = stack[-1]
        for child, _ in children:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            stack.pop()
            yield node
