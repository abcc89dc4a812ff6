"""Eager steps on GPUs whose losses are read two steps later: the host waits for no step that it has just launched.

A loss that is not finite stops the update on the GPU itself, by the flag with which fp16's GradScaler stops fused
optimizers. The flag stays set: when the host reads the loss, the weights are still those of the step before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from evenstep.data.loader import Batch
from evenstep.distributed.heartbeat import UPDATE
from evenstep.private_apis import flag_non_finite_, has_step_hooks, hooks_after_steps, hooks_before_steps
from evenstep.strategies.base import forget_gradients, has_torch_step, update
from evenstep.training.clipping import clip_gradients
from evenstep.training.fused_optimizer import FusedAdam, is_fused, start_momentum
from evenstep.training.host_copy import side_stream
from evenstep.training.loss_weighting import LateLoss, MeanLoss
from evenstep.training.optimizer_step import WeightUpdate
from evenstep.training.step import Eager, Recipe, Taken, agreed_when_read, reads_late
from evenstep.training.team import Launched, Team

LAG = 2
"""Steps that the host runs ahead of the GPU."""
SLOTS = 4
"""Steps whose values the host keeps: more than may be running when those of the first are read."""
assert LAG + 1 < SLOTS


class FiniteGuard:
    """A flag on the GPU: from the first loss on that is not finite, fused optimizers leave the weights as they are."""

    def __init__(self, device: torch.device) -> None:
        self.flag = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)

    def check(self, values: torch.Tensor) -> None:
        """Set the flag if one of these is not finite."""
        wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
        flag_non_finite_([wide], self.flag, self._one)

    @contextmanager
    def stopping(self, optimizer: Any) -> Iterator[None]:
        """Inside, the optimizer's step does nothing where the flag is set."""
        optimizer.found_inf = self.flag
        try:
            yield
        finally:
            del optimizer.found_inf


class Running(Protocol):
    """A step that the GPU may still be running."""

    event: torch.cuda.Event

    def arrive(self) -> object:
        """Wait until it has finished; its event and its place on the host can be used again afterwards."""

    def read(self) -> MeanLoss:
        """Its loss."""


class Ahead:
    """The steps that the host is ahead of the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.number = 0
        self._device = device
        self._running: deque[Running] = deque()
        self._events = [torch.cuda.Event() for _ in range(SLOTS)]
        self._reached = [torch.cuda.Event() for _ in range(SLOTS)]
        """When the GPU has computed what is copied to the host."""
        self._pinned: dict[tuple[str, torch.dtype, torch.Size], list[torch.Tensor]] = {}
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(SLOTS)]
        """Of each step: a place on the host, and the values, whose memory is kept until they have been copied."""
        self._waits_for_host = False
        """Whether the GPU had finished, when the host came to wait for it."""

    def add(self, step: Running) -> None:
        """A step was launched; wait for the one `LAG` steps before it."""
        step.event = self._events[self.number % SLOTS]
        self._record(step.event)
        self.number += 1
        # Its last values were those of a step that has arrived.
        self._copies[self.number % SLOTS] = []
        self._running.append(step)
        if len(self._running) > LAG:
            first = self._running.popleft()
            self._waits_for_host = first.event.query()
            # The host waits here, for less than a step, and not where a loss is read.
            first.arrive()

    def _record(self, event: torch.cuda.Event) -> None:
        """Let the event be that of the end of the step, with its copies to the host."""
        copies = self._copies[self.number % SLOTS]
        current = torch.cuda.current_stream(self._device.index)
        if not copies or self._waits_for_host:
            for host, values in copies:
                host.copy_(values, non_blocking=True)
            event.record(current)
            return
        # On the stream of the computation, the next step would wait for a copy: 9 us. Another stream takes the host 40.
        stream, reached = side_stream(self._device), self._reached[self.number % SLOTS]
        reached.record(current)
        stream.wait_event(reached)
        with torch.cuda.stream(stream):
            for host, values in copies:
                host.copy_(values, non_blocking=True)
        event.record(stream)

    def settle(self) -> None:
        """Wait for all of them, and raise if the loss of one is not finite."""
        while self._running:
            self._running.popleft().read()

    def copy(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Where on the host the values of the step that is launched next are, when it has finished."""
        key = name, values.dtype, values.shape
        if key not in self._pinned:
            self._pinned[key] = [torch.empty_like(values, device="cpu", pin_memory=True) for _ in range(SLOTS)]
        host = self._pinned[key][self.number % SLOTS]
        self._copies[self.number % SLOTS].append((host, values))
        return host


def _only(losses: list[MeanLoss], norms: list[float]) -> MeanLoss:
    losses[0].grad_norm = norms[0] if norms else None
    return losses[0]


class LateStep:
    """An eager step that the GPU may still be running."""

    event: torch.cuda.Event

    def __init__(
        self,
        team: Team,
        launched: Sequence[Launched],
        norms: torch.Tensor | None = None,
        combined: Callable[[list[MeanLoss], list[float]], MeanLoss] = _only,
    ) -> None:
        """`combined` makes one loss of those of several backwards, and of the norms of their gradients."""
        self._requests, self._launched, self._norms, self._combined = team.requests, launched, norms, combined
        self._grad_norms: list[float] = []
        self._has_arrived = False
        self._loss: MeanLoss | None = None

    def arrive(self) -> None:
        if self._has_arrived:
            return
        self.event.synchronize()
        self._has_arrived = True
        for one in self._launched:
            assert isinstance(one.totals, LateLoss)
            one.totals.arrive()
        if self._norms is not None:
            self._grad_norms, self._norms = self._norms.flatten().tolist(), None

    def read(self) -> MeanLoss:
        self.arrive()
        if self._loss is None:
            self._loss = self._combined([one.read() for one in self._launched], self._grad_norms)
        self._requests.agree(self._launched[-1].totals.request_code)
        return self._loss


class LateSteps(Eager):
    """Eager steps; the loss is read late where the optimizer can be stopped on the GPU, and else before the update."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.ahead = Ahead(recipe.team.world.device)
        self.guard = FiniteGuard(recipe.team.world.device)
        self.observes = False
        """Whether to note which parameters had a gradient."""
        self.reached: list[bool] = []
        self._adam = FusedAdam(recipe.team.world.device, self.guard.flag)
        self._may_be_late = reads_late(recipe.team, recipe.model.weights)
        # Not by hooks, which may be on one rank only: ranks read, and so agree to stop, after the same step.
        self.lag = LAG if self._may_be_late and is_fused(recipe.optimizer) else self.lag

    @property
    def is_late(self) -> bool:
        """Whether the next step can be: a fused kernel of torch's own, and no hook that would see a stopped step."""
        return self._may_be_late and can_be_stopped(self._recipe.optimizer)

    def take(self, batch: Batch) -> Taken:
        recipe = self._recipe
        if not self.is_late:
            return self.take_early(batch)
        launched = recipe.team.launch(recipe.loss, (recipe.model,), batch)
        self._observe()
        return self.finish(launched)

    def finish(self, launched: Launched) -> Taken:
        """The second half of a step: nothing here waits for the first."""
        recipe = self._recipe
        judge(launched, self.guard, self.ahead)
        recipe.team.world.spans.begin(UPDATE)
        recipe.team.check(recipe.optimizer)
        norm = clip_gradients(recipe.optimizer, recipe.clip) if recipe.clip is not None else None
        self._update_weights(recipe.optimizer)
        recipe.team.finish_batch()
        recipe.advance()
        step = LateStep(recipe.team, [launched], self.ahead.copy("norm", norm) if norm is not None else None)
        self.ahead.add(step)
        return step

    def _update_weights(self, optimizer: torch.optim.Optimizer) -> None:
        start_momentum(optimizer)
        if not self._adam.step(optimizer):
            with self.guard.stopping(optimizer):
                update(optimizer)
        forget_gradients(optimizer)

    def recheck(self) -> None:
        self._adam.recheck()

    def take_early(self, batch: Batch) -> Taken:
        """A step whose loss is read before the update, when those before it have been read."""
        self.ahead.settle()
        return agreed_when_read(self._recipe.team.requests, partial(super().take, batch))

    def update(self) -> WeightUpdate:
        self._observe()
        return super().update()

    def settle(self) -> None:
        self.ahead.settle()

    def _observe(self) -> None:
        if self.observes:
            self.reached = [weight.grad is not None for weight in self._recipe.model.weights]


def judge(launched: Launched, guard: FiniteGuard, ahead: Ahead, name: str = "loss") -> None:
    """After backward, on the GPU: complete the gradients, set the flag if the loss is not finite, and copy it."""
    totals = launched.totals
    assert isinstance(totals, LateLoss)
    values = totals.values()
    launched.complete(totals.factor(values))
    if not totals.is_alone:
        guard.check(values)
    if totals.sent is None:
        totals.keep(ahead.copy(name, values))


def can_be_stopped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a flag on the GPU makes its step do nothing at all."""
    is_hooked = has_step_hooks(optimizer) or hooks_before_steps or hooks_after_steps
    return is_fused(optimizer) and not is_hooked and has_torch_step(optimizer)
