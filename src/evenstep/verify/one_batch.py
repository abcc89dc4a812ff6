"""One model and one batch, split in any way: is the loss of the batch the mean of the losses of its parts?

At the start every token of a language model has nearly the same loss, so that the loss alone does not distinguish a
mean over tokens from a mean over samples. Gradients do, from the first step on: they must add up in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from evenstep.data.adapt import adapt_train
from evenstep.data.augmentation import SampleTransform, collated
from evenstep.data.feature_scaler import unfitted
from evenstep.data.iterable import Stream
from evenstep.data.nested import leaves, map_tensors
from evenstep.distributed.world import World
from evenstep.plan import Plan
from evenstep.private_apis import BatchNorm
from evenstep.sampling.order import Span
from evenstep.sampling.rng import Draws, Ids, is_same_state, rng_states, seed_everything
from evenstep.strategies.base import evaluating, same_numbers
from evenstep.task import Amount, Task
from evenstep.training.evaluation import LossAndMetrics
from evenstep.training.optimizer_step import make_optimizer
from evenstep.training.several_models import optimizers_of, parts_of
from evenstep.training.team import Team
from evenstep.verify.recorder import LEAST, DropoutOff, as_real, perturbed, same_torch, sampled, torch_states

Kind = Literal["sound", "sum", "weighted", "mixed"]
Parts = tuple[int, ...]
SUBSETS: tuple[Parts, ...] = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
TOGETHER = SUBSETS[3:]
WHOLE = SUBSETS[-1]


@dataclass(frozen=True)
class Outcome:
    """Loss and gradients of some samples."""

    loss: float
    """The mean, or the sum where there is a count."""
    gradients: Mapping[str, torch.Tensor]
    """Flat, in float64, by parameter; some elements of a large one. A missing gradient is zero."""
    count: float | None = None
    norms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rounding:
    loss: float
    """Relative to the largest loss."""
    gradient: float
    """Relative to the gradient's largest element."""
    floor: float
    """No gradient is taken to be smaller than this part of the largest one."""
    moved_loss: float = 0.0
    moved: Mapping[str, float] = field(default_factory=dict)
    """What the loss and each gradient may be off at least, in their own units."""


@dataclass(frozen=True)
class CutUp:
    """How the loss and gradients of a batch follow from those of its parts."""

    kind: Kind
    """sound: a mean over samples. sum: a sum over samples. weighted: a mean over something else, of which each part
    holds its own number. mixed: a sample's value depends on which others are there."""
    whole: float
    by_parts: float
    """The mean of the losses of the parts, each weighed by its samples."""
    factor: float = 1.0
    """Of a weighted one: how many times as much as its samples the part weighs that is furthest off."""
    unlike: tuple[str, ...] = ()
    """Gradients that do not add up where the loss does, the one that is furthest off first."""


Values = dict[Parts, torch.Tensor]
Combine = Callable[[Sequence[int], Sequence[torch.Tensor]], torch.Tensor]


def cut_up(given: Mapping[Parts, Outcome], sizes: Sequence[int], rounding: Rounding) -> CutUp:
    """Compare what SUBSETS of three parts give, in the units of what each number may be off."""
    names = list(dict.fromkeys(name for one in given.values() for name in one.gradients))
    columns = _in_units(given, names, rounding)
    values: Values = {chosen: torch.cat(columns[chosen]) for chosen in SUBSETS}
    whole, alone = given[WHOLE].loss, [given[part,].loss for part in range(3)]
    by_parts = sum(size * one for size, one in zip(sizes, alone, strict=True)) / sum(sizes)
    if _misfit(values, _mean_by(sizes)) <= 1:
        return CutUp("sound", whole, by_parts)
    if _misfit(values, _sum) <= 1:
        return CutUp("sum", whole, by_parts)
    weights = _fitted(values)
    if all(weight > 0 for weight in weights) and _misfit(values, _mean_by(weights)) <= 1:
        factors = [weight / sum(weights) / (size / sum(sizes)) for weight, size in zip(weights, sizes, strict=True)]
        return CutUp("weighted", whole, by_parts, max(factors, key=lambda factor: abs(math.log(factor))))
    losses = {chosen: columns[chosen][0] for chosen in SUBSETS}
    if _misfit(losses, _mean_by(sizes)) <= 1:
        return CutUp("sound", whole, by_parts, unlike=_unlike(columns, names, _mean_by(sizes)))
    if _misfit(losses, _sum) <= 1:
        return CutUp("sum", whole, by_parts, unlike=_unlike(columns, names, _sum))
    return CutUp("mixed", whole, by_parts)


def _unlike(columns: Mapping[Parts, Sequence[torch.Tensor]], names: Sequence[str], combine: Combine) -> tuple[str, ...]:
    """Gradients that do not add up; the one that is furthest off first."""
    off = {
        name: _misfit({chosen: columns[chosen][index] for chosen in SUBSETS}, combine)
        for index, name in enumerate(names, 1)
    }
    return tuple(sorted((name for name in names if off[name] > 1), key=lambda name: -off[name]))


def _in_units(
    given: Mapping[Parts, Outcome], names: Sequence[str], rounding: Rounding
) -> dict[Parts, list[torch.Tensor]]:
    """The loss and then every gradient, divided by what it may be off."""
    most = {name: max(_largest(one.gradients.get(name)) for one in given.values()) for name in names}
    largest = max(most.values(), default=0.0)
    units = {
        name: max(rounding.gradient * max(most[name], rounding.floor * largest), rounding.moved.get(name, 0.0), 1e-300)
        for name in names
    }
    scale = max(abs(one.loss) for one in given.values())
    of_loss = max(rounding.loss * scale, rounding.moved_loss, 1e-300)
    known = {name: gradient for one in given.values() for name, gradient in one.gradients.items()}
    zeros = {name: torch.zeros_like(known[name]) for name in names}
    return {
        chosen: [
            torch.tensor([one.loss / of_loss], dtype=torch.float64),
            *(one.gradients.get(name, zeros[name]) / units[name] for name in names),
        ]
        for chosen, one in given.items()
    }


def _largest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())


def _mean_by(weights: Sequence[float]) -> Combine:
    def mean(chosen: Sequence[int], alone: Sequence[torch.Tensor]) -> torch.Tensor:
        total = sum(weights[part] for part in chosen)
        return torch.stack([weights[part] / total * alone[part] for part in chosen]).sum(0)

    return mean


def _sum(chosen: Sequence[int], alone: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([alone[part] for part in chosen]).sum(0)


def _misfit(values: Values, combine: Combine) -> float:
    """How far the parts, put together, are at most from what they give together; no number is too far."""
    alone = [values[part,] for part in range(3)]
    off = [float((values[chosen] - combine(chosen, alone)).abs().max()) for chosen in TOGETHER]
    return max(off) if all(map(math.isfinite, off)) else math.inf


def _fitted(values: Values) -> list[float]:
    """The weights with which the parts come closest: sum of w_i (together - part_i) is zero for all that are together.

    The least eigenvector of the squares of these equations; all of one sign, or it is no mean.
    """
    squares = torch.zeros(3, 3, dtype=torch.float64)
    for chosen in TOGETHER:
        together = values[chosen]
        rows = [together - values[part,] if part in chosen else torch.zeros_like(together) for part in range(3)]
        squares += torch.stack(rows) @ torch.stack(rows).T
    if not bool(squares.isfinite().all()):
        return [0.0] * 3
    least = torch.linalg.eigh(squares).eigenvectors[:, 0]
    return [float(weight) for weight in least / least.sum()]


TOLERANCE = 1e-9
ROUGH_TOLERANCE = 1e-3
PERTURBATIONS = 3
"""How often the weights are perturbed to measure rounding, where a task computes in lower precision."""
TIMES_MOVED = 10.0
"""How many times as far as a perturbation moves it a value may differ."""
STRIDES = (1e-5, 1e-4, 1e-3, 1e-2)
"""By which part of itself the loss is moved to measure its slope: rounding hides the small, curvature the large."""


class Workbench:
    """The task's initial model, and its first global batch in any split."""

    def __init__(self, plan: Plan, task: Task, team: Team, dropout: DropoutOff, is_rough: bool) -> None:
        self.task = task
        self._is_rough = is_rough
        self.tolerance = ROUGH_TOLERANCE if is_rough else TOLERANCE
        self._least = LEAST[plan.precision] if is_rough else 10 * TOLERANCE
        self._plan = plan
        self._team = team
        self._device = team.world.device
        self._adopted = adapt_train(task)
        self._streamed: list[Any] = []
        self.ids = self._first_ids()
        self.drawing_code: set[str] = set()
        """The user's functions that drew from global generators."""
        self.model: nn.Module = team.precision.fit(dropout.in_layers(task.model())).to(self._device)
        if not self.model.training:
            # As the worker does; of a model in training mode, layers may be in eval mode on purpose.
            self.model.train()
        for scaler in unfitted(self.model):
            scaler.fit(iter([self.data()]), World(0, 1, (self._device,)))
        key, make = next(iter(optimizers_of(task).items()))
        self.optimizer = make_optimizer(make, parts_of(self.model)[key])
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.batch_norms = [name for name, one in self.model.named_modules() if isinstance(one, BatchNorm)]

    def thirds(self) -> list[Ids]:
        """The batch's ids in three parts of unequal size."""
        num = len(self.ids)
        cuts = [0, max(1, num // 3), max(2, num // 3 + num // 4), num]
        return [self.ids[begin:end] for begin, end in pairwise(cuts)]

    def union(self, chosen: Sequence[int]) -> Ids:
        parts = self.thirds()
        joined: Ids = np.concatenate([parts[part] for part in chosen])
        return joined

    def data(self, ids: Ids | None = None) -> Any:
        """Samples as the training gets them."""
        ids = self.ids if ids is None else ids
        transform = SampleTransform(self._plan.seed, 0, self.task.augment)
        source = self._adopted.source
        if isinstance(source, Stream):
            read = collated([self._streamed[id_] for id_ in ids], ids, self.task.collate)
        else:
            read = source.fetch(ids, ids, transform)
        moved = map_tensors(read, lambda tensor: self._team.precision.fit_tensor(tensor.to(self._device)))
        if self.task.augment_batch is None:
            return moved
        before, on_gpus = rng_states(), torch_states()
        changed = self.task.augment_batch(moved, Draws(ids, self._plan.seed, 0, self._device))
        if not is_same_state(before, rng_states()) or not same_torch(on_gpus, torch_states()):
            self.drawing_code.add("augment_batch")
        return changed

    def compute(
        self,
        ids: Ids | None = None,
        seed: int = 0,
        watch: AbstractContextManager[None] | None = None,
        restores: bool = True,
    ) -> Outcome:
        """Loss and gradients, from the initial state unless that is not to be restored."""
        if restores:
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
        return Outcome(float(loss.detach()), gradients, count, norms)

    def rounding(self) -> Rounding:
        """How far the first batch's loss and gradients may be off; where digits are few, by disturbing the weights."""
        if not self._is_rough:
            return Rounding(self._least / 10, self._least, 1e-6)
        still = self.compute()
        moved_loss, moved = 0.0, dict.fromkeys(still.gradients, 0.0)
        for number in range(1, PERTURBATIONS + 1):
            with self._kept_weights():
                perturbed(self.model, number)
                other = self.compute()
            moved_loss = max(moved_loss, TIMES_MOVED * abs(other.loss - still.loss))
            for name in still.gradients.keys() & other.gradients.keys():
                distance = float((other.gradients[name] - still.gradients[name]).abs().max())
                moved[name] = max(moved[name], TIMES_MOVED * distance)
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
        """BatchNorm uses its running statistics."""
        return evaluating(*(layer for layer in self.model.modules() if isinstance(layer, BatchNorm)))

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
        second = self.compute(one, restores=False)
        self._restore()
        return abs(first.loss - second.loss) > self._least / 10 * max(abs(first.loss), abs(second.loss))

    def is_cut_alike(self) -> bool | None:
        """Whether samples stay the same when their batch is split; None if they cannot be compared."""
        whole, parts = self.data(), [self.data(part) for part in self.thirds()]
        columns, of_parts = _tensors(whole), [_tensors(part) for part in parts]
        if any(len(one) != len(columns) for one in of_parts):
            return None
        for column, *cut in zip(columns, *of_parts, strict=True):
            has_rows = column.ndim and all(one.shape[1:] == column.shape[1:] for one in cut)
            # Other columns belong to the batch, not to its samples: lengths packed together, a table of classes.
            is_of_samples = has_rows and sum(len(one) for one in cut) == len(column)
            if is_of_samples and not same_numbers(torch.cat(cut), column):
                return False
        return True

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
    return [leaf for leaf in leaves(data) if isinstance(leaf, torch.Tensor)]
