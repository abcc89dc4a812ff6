"""Every rank runs the same layers and gets the same gradients: seen before each of fsdp's collectives.

A layer or a head that some ranks do not use makes their collectives differ (see `comm.ledger`). torch's hooks have no
place for this: it wraps `FSDPParamGroup.post_backward`, private, as torch 2.11 and 2.13 have it.

Between machines each comparison is a round trip, so only the first forwards are compared, and then one of many, each
with its backward. Ranks that begin to differ in between end as torch ends them: in its error, or at a timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from evenstep.errors import TaskError
from evenstep.worker.comm.ledger import Ledger
from evenstep.worker.tap import Tap

KINDS = 2**32
NUM_FIRST = 16
"""Forwards that are compared at the start of a run, where comparing is slow; most differences show at once."""
EVERY = 256
"""Of those after that, one in so many."""


class Event(IntEnum):
    """What a rank is about to do, or lacks."""

    GATHER = 1
    """The parameters of a unit are gathered, for its forward or its backward."""
    END = 2
    """The forward is over."""
    UNUSED = 3
    """A parameter got no gradient in this step."""
    REDUCE = 4
    """The gradients of a unit are averaged."""


class Agreement:
    """Of all models of one process: each event is compared with the other ranks' before it happens."""

    def __init__(self, ledger: Ledger, rank: int, tap: Tap) -> None:
        self._ledger, self._rank, self._tap = ledger, rank, tap
        self._units: list[tuple[str, list[str]]] = []
        """The name of each unit, and those of its parameters."""
        self._parameters: list[str] = []
        self._num_forwards = 0

    def gathers(self, name: str, parameters: list[str]) -> Callable[[], None]:
        """To be called before the parameters of this unit are gathered."""
        self._units.append((name, parameters))
        index = len(self._units) - 1
        return lambda: self._compare(Event.GATHER, index)

    def watch_forward(self, root: nn.Module) -> None:
        """A rank that runs fewer layers goes on to another collective than the others."""
        # The compiler would trace what it cannot repeat.
        root.register_forward_hook(torch.compiler.disable(lambda *_: self._compare(Event.END, 0)))

    def watch_backward(self, group: Any) -> None:
        """Compare which parameters of a unit got gradients, before these are averaged."""
        unit, start = len(self._units) - 1, len(self._parameters)
        self._parameters += self._units[unit][1]
        post_backward = group.post_backward

        def compared(*unused: Any) -> None:
            if group.reduce_grads:
                has_gradient = [_has_gradient(one) for one in group.fsdp_params]
                for place, one in enumerate(group.fsdp_params):
                    if not has_gradient[place] and one.sharded_param.requires_grad:
                        self._compare(Event.UNUSED, start + place)
                if any(has_gradient):
                    self._compare(Event.REDUCE, unit)
            post_backward(*unused)

        group.post_backward = compared

    def _compare(self, event: Event, index: int) -> None:
        if self._tap.is_muted or not self._is_due(event):
            return
        other = self._ledger.differing(event * KINDS + index)
        if other is None:
            return
        theirs = self._words(Event(other.entry // KINDS), other.entry % KINDS)
        raise TaskError(
            f"fsdp needs the same layers and gradients on all ranks in every step: rank {self._rank} "
            f"{self._words(event, index)}, rank {other.rank} {theirs}.\nUse them on every rank (adding "
            "0 * layer(x).sum() to the loss is enough), or use dp, where replicas may differ in this"
        )

    def _is_due(self, event: Event) -> bool:
        """The same on all ranks: a layer or a gradient that one of them lacks changes no number of forwards."""
        number = self._num_forwards
        self._num_forwards += event is Event.END
        return not self._ledger.waits or number < NUM_FIRST or number % EVERY == 0

    def _words(self, event: Event, index: int) -> str:
        if event is Event.END:
            return "runs no more layers"
        if event is Event.UNUSED:
            return f"has no gradient for {self._parameters[index]}"
        name, parameters = self._units[index]
        shown = ", ".join(parameters[:4]) + " ..." * (len(parameters) > 4)
        return f"runs {name or 'the model'} ({shown})" if event is Event.GATHER else f"has gradients for {shown}"


def _has_gradient(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    # A unit that never ran has no such tensor yet.
    unsharded = getattr(parameter, "_unsharded_param", None)
    return unsharded is not None and unsharded.grad is not None
