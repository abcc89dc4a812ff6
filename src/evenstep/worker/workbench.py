"""One model, one batch, nothing around them: where a task is taken apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.draws import Draws, Ids
from evenstep.order import Span
from evenstep.plan import Plan
from evenstep.seeding import generator_states, is_same_state, seed_everything
from evenstep.task import Amount, Task
from evenstep.worker.adopt import adopt
from evenstep.worker.copies import same_numbers
from evenstep.worker.cuts import Rounding
from evenstep.worker.disturbed import LEAST, disturbed
from evenstep.worker.draws_seen import same_torch, torch_states
from evenstep.worker.dropouts import DropoutOff
from evenstep.worker.evaluation import LossAndMetrics
from evenstep.worker.persample import Touch, collated
from evenstep.worker.scaler import unfitted
from evenstep.worker.source import to_device
from evenstep.worker.spread import evaluating
from evenstep.worker.stream import Stream
from evenstep.worker.team import Team
from evenstep.worker.witness import as_real, sampled
from evenstep.worker.world import World

TOLERANCE = 1e-9
ROUGH_TOLERANCE = 1e-3
DISTURBANCES = 3
"""How often the weights are disturbed to see what rounding does, where a task computes in fewer digits."""
TIMES_MOVED = 10.0
"""How much more than a disturbance moves it something may be off."""
STRIDES = (1e-5, 1e-4, 1e-3, 1e-2)
"""By which part of itself the loss is moved to measure its slope: rounding hides the small, curvature the large."""


@dataclass(frozen=True)
class Outcome:
    """What a loss and its backward gave."""

    loss: float
    """The mean, or the sum where there is a count."""
    count: float | None
    gradients: dict[str, torch.Tensor]
    """Flat, and of a large one a fixed part: several outcomes are held at once."""
    norms: dict[str, float]


class Workbench:
    """The task's model as it starts, and its first global batch in any cut."""

    def __init__(self, plan: Plan, task: Task, team: Team, dropout: DropoutOff, is_rough: bool) -> None:
        self.task = task
        self._is_rough = is_rough
        self.tolerance = ROUGH_TOLERANCE if is_rough else TOLERANCE
        self._least = LEAST[plan.precision] if is_rough else 10 * TOLERANCE
        self._plan = plan
        self._team = team
        self._device = team.world.device
        self._adopted = adopt(task.train, task.collate, task.sampler)
        self._streamed: list[Any] = []
        self.ids = self._first_ids()
        self._drew: set[str] = set()
        self.model: nn.Module = team.precision.fit(dropout.in_layers(task.model())).to(self._device)
        if not self.model.training:
            # As the worker does; of a model in training mode, layers may be in eval mode on purpose.
            self.model.train()
        for scaler in unfitted(self.model):
            scaler.fit(iter([self.data()]), World(0, 1, (self._device,)))
        self.optimizer = task.optimizer(self.model.parameters())
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.batch_norms = [name for name, one in self.model.named_modules() if isinstance(one, _BatchNorm)]

    def thirds(self) -> list[Ids]:
        """The batch's ids in three parts of unequal size."""
        num = len(self.ids)
        cuts = [0, max(1, num // 3), max(2, num // 3 + num // 4), num]
        return [self.ids[begin:end] for begin, end in pairwise(cuts)]

    def union(self, chosen: Sequence[int]) -> Ids:
        """Some of the thirds together."""
        parts = self.thirds()
        joined: Ids = np.concatenate([parts[part] for part in chosen])
        return joined

    def data(self, ids: Ids | None = None) -> Any:
        """Samples as the training gets them."""
        ids = self.ids if ids is None else ids
        touch = Touch(self._plan.seed, 0, self.task.augment)
        source = self._adopted.source
        if isinstance(source, Stream):
            read = collated([self._streamed[id_] for id_ in ids], ids, self.task.collate)
        else:
            read = source.fetch(ids, ids, touch)
        moved = to_device(read, lambda tensor: self._team.precision.fit_tensor(tensor.to(self._device)))
        if self.task.augment_batch is None:
            return moved
        before, on_cards = generator_states(), torch_states()
        changed = self.task.augment_batch(moved, Draws(ids, self._plan.seed, 0, self._device))
        if not is_same_state(before, generator_states()) or not same_torch(on_cards, torch_states()):
            self._drew.add("augment_batch")
        return changed

    def compute(
        self, ids: Ids | None = None, seed: int = 0, watch: AbstractContextManager[None] | None = None
    ) -> Outcome:
        """Loss and gradients, always from the same state."""
        self._restore()
        for weight in self.model.parameters():
            weight.grad = None
        data = self.data(ids)
        seed_everything(seed)
        with watch or nullcontext():
            return self.backward(self.model, data)

    def backward(self, model: nn.Module, data: Any) -> Outcome:
        """Loss and gradients of any model."""
        with self._team.precision.autocast(self._device):
            amount = self.task.loss(model, data)
        loss, count = (amount, None) if isinstance(amount, torch.Tensor) else (amount[0], float(amount[1]))
        loss.backward()
        found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        gradients = {name: sampled(name, gradient)[name].double() for name, gradient in found.items()}
        norms = {name: float(as_real(gradient).double().norm()) for name, gradient in found.items()}
        return Outcome(float(loss.detach()), count, gradients, norms)

    def rounding(self) -> Rounding:
        """How far the first batch's loss and gradients may be off; where digits are few, by disturbing the weights."""
        if not self._is_rough:
            return Rounding(self._least / 10, self._least, 1e-6)
        still = self.compute()
        moved_loss, moved = 0.0, dict.fromkeys(still.gradients, 0.0)
        for number in range(1, DISTURBANCES + 1):
            with self._kept_weights():
                disturbed(self.model, number)
                other = self.compute()
            moved_loss = max(moved_loss, TIMES_MOVED * abs(other.loss - still.loss))
            for name in still.gradients.keys() & other.gradients.keys():
                apart = float((other.gradients[name] - still.gradients[name]).abs().max())
                moved[name] = max(moved[name], TIMES_MOVED * apart)
        return Rounding(self._least / 10, self._least, 1e-3, moved_loss, moved)

    def has_slope(self, name: str) -> bool | None:
        """Whether the gradient of a parameter is the slope of the loss; None where rounding or jumps hide that."""
        loss = self.compute().loss
        weight = dict(self.model.named_parameters())[name]
        assert weight.grad is not None
        along = weight.grad.detach().clone()
        square = float(as_real(along).double().square().sum())
        if not loss or not square or not math.isfinite(square):
            return None
        slopes = [self._slope(weight, along, stride * abs(loss) / square) / square for stride in STRIDES]
        seen = [(one + next_) / 2 for one, next_ in pairwise(slopes) if abs(one - next_) < 0.02 * max(1.0, abs(one))]
        if not seen:
            return None
        off = min(abs(slope - 1) for slope in seen)
        return True if off < 0.05 else False if off > 0.2 else None

    def _slope(self, weight: nn.Parameter, along: torch.Tensor, stride: float) -> float:
        """By how much the loss changes along a direction, from one side of the weight to the other."""
        losses = []
        for side in (stride, -stride):
            with self._kept_weights():
                with torch.no_grad():
                    weight.add_(along, alpha=side)
                losses.append(self.compute().loss)
        return (losses[0] - losses[1]) / (2 * stride)

    @contextmanager
    def _kept_weights(self) -> Iterator[None]:
        kept = [weight.detach().clone() for weight in self.model.parameters()]
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, before in zip(self.model.parameters(), kept, strict=True):
                    weight.copy_(before)

    def measure(self, ids: Ids) -> dict[str, Amount]:
        """What an evaluation computes of these samples."""
        data = self.data(ids)
        self._restore()
        with evaluating(self.model), torch.no_grad(), self._team.precision.autocast(self._device):
            return LossAndMetrics(self.task)(self.model, data)

    def without_batch_statistics(self) -> AbstractContextManager[None]:
        """BatchNorm normalizes by what it remembers."""
        return evaluating(*(layer for layer in self.model.modules() if isinstance(layer, _BatchNorm)))

    def buffers_before(self) -> dict[str, torch.Tensor]:
        """Those that are not BatchNorm's."""
        return {name: value for name, value in self._buffers.items() if not self._is_of_norm(name)}

    def buffers_after(self, ids: Ids) -> dict[str, torch.Tensor]:
        """What a forward on these samples makes of them."""
        self.compute(ids)
        own = {name: value.clone() for name, value in self.model.named_buffers() if not self._is_of_norm(name)}
        self._restore()
        return own

    def reads_buffers(self) -> bool:
        """Whether the loss of some samples is another one after a forward on others, which changed them."""
        one, other, _ = self.thirds()
        first = self.compute(one)
        self.compute(other)
        for weight in self.model.parameters():
            weight.grad = None
        data = self.data(one)
        seed_everything(0)
        second = self.backward(self.model, data)
        self._restore()
        return abs(first.loss - second.loss) > self._least / 10 * max(abs(first.loss), abs(second.loss))

    def is_cut_alike(self) -> bool | None:
        """Whether samples are the same when their batch is cut up; None if they cannot be laid side by side."""
        whole, parts = self.data(), [self.data(part) for part in self.thirds()]
        columns, of_parts = _tensors(whole), [_tensors(part) for part in parts]
        if any(len(one) != len(columns) for one in of_parts):
            return None
        for place, column in enumerate(columns):
            cut = [one[place] for one in of_parts]
            if not column.ndim or any(one.shape[1:] != column.shape[1:] for one in cut):
                continue
            # A column of the batch rather than of its samples: lengths packed together, a table of classes.
            if sum(len(one) for one in cut) != len(column):
                continue
            if not same_numbers(torch.cat(cut), column):
                return False
        return True

    def code_that_draws(self) -> list[str]:
        """Which of the user's functions drew from generators that are not given to them."""
        return sorted(self._drew)

    def _is_of_norm(self, name: str) -> bool:
        return name.rpartition(".")[0] in self.batch_norms

    @torch.no_grad()
    def _restore(self) -> None:
        for name, buffer in self.model.named_buffers():
            if name in self._buffers and self._buffers[name].shape == buffer.shape:
                buffer.copy_(self._buffers[name])

    def _first_ids(self) -> Ids:
        order = self._adopted.order(self._plan.seed, self._plan.batch)
        if order is None:
            assert isinstance(self._adopted.source, Stream)
            self._streamed = self._adopted.source._opened(self._plan.seed, 0).take(self._plan.batch)
            return np.arange(len(self._streamed))
        return order.ids(Span(0, 0, min(self._plan.batch, order.lengths.of(0) or self._plan.batch)))


def _tensors(data: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    to_device(data, keep)
    return found
