"""`--statistics STEPS`: mean, deviation, norm, largest value and zeros of every parameter, gradient and layer's output.

They are those of the whole model and of the whole global batch: sums over shards, devices and micro-batches, which two
collectives add up at the end of such a step. Other steps pay nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from evenstep.checkpoint.shards import own_rows
from evenstep.data.loader import Batch
from evenstep.data.nested import leaves
from evenstep.record import LayerStatistics, ValueStatistics
from evenstep.training.loss_context import computes_samples
from evenstep.training.step import Done, Recipe, Taken, agreed_when_read, eager_steps

Sums = tuple[str, str, torch.Tensor, torch.Tensor]
"""Kind, name, [count, sum, sum of squares, zeros], and the largest absolute value."""


class InspectedSteps:
    """Eager steps, some of which are looked into."""

    def __init__(self, recipe: Recipe, every: int) -> None:
        self.messages: list[str] = []
        self._rows: list[LayerStatistics] = []
        self._recipe, self._every = recipe, every
        self._steps = eager_steps(recipe)
        self.lag = self._steps.lag

    def recheck(self) -> None:
        self._steps.recheck()

    def up_to(self, step: int) -> list[LayerStatistics]:
        """The statistics of steps up to this one, once; on a GPU, later ones may have been taken."""
        due = [row for row in self._rows if row.step <= step]
        self._rows = self._rows[len(due) :]
        return due

    def take(self, batch: Batch) -> Taken:
        step = batch.loader.num_finished + 1
        if step % self._every:
            return self._steps.take(batch)
        self._steps.settle()
        return agreed_when_read(self._recipe.team.requests, partial(self._inspected, batch, step))

    def _inspected(self, batch: Batch, step: int) -> Taken:
        found = Inspection(self._recipe)
        with found.outputs():
            loss = self._steps.backward(batch)
        found.add_gradients()
        update = self._steps.update()
        found.add_parameters()
        self._rows.append(found.statistics(step))
        return Done(loss, update)


class Inspection:
    """What one step shows."""

    def __init__(self, recipe: Recipe) -> None:
        self._model, self._scaler = recipe.model, recipe.team.precision.scaler
        self._world = recipe.team.world
        self._found: list[Sums] = []

    @contextmanager
    def outputs(self) -> Iterator[None]:
        """Inside, what layers without layers of their own return is looked at."""
        bound: list[Any] = list(self._model.loss_modules)
        hooks = [
            layer.register_forward_hook(lambda *given, name=name: self._add_output(name, given[-1]))
            for one in bound
            for name, layer in one.model.named_modules()
            if not any(True for _ in layer.children())
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def add_gradients(self) -> None:
        """Of the global batch, before they are clipped."""
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        for name, weight in self._model.module.named_parameters():
            if weight.grad is not None:
                self._add_whole("gradients", name, weight.grad, 1 / scale)

    def add_parameters(self) -> None:
        """After the update."""
        for name, weight in self._model.module.named_parameters():
            self._add_whole("parameters", name, weight.detach())

    def statistics(self, step: int) -> LayerStatistics:
        """Of all devices together; all ranks call this."""
        keys = self._keys()
        sums, most = self._together(keys)
        kinds: dict[str, dict[str, ValueStatistics]] = {"parameters": {}, "gradients": {}, "outputs": {}}
        for (kind, name), of_all, largest in zip(keys, sums.tolist(), most.tolist(), strict=True):
            kinds[kind][name] = value_statistics(of_all, largest)
        return LayerStatistics(step=step, **kinds)

    def _add_output(self, name: str, output: Any) -> None:
        tensor = next((one for one in leaves(output) if isinstance(one, torch.Tensor)), None)
        if tensor is not None and tensor.is_floating_point() and computes_samples():
            self._found.append(("outputs", name, *_sums(tensor.detach())))

    def _add_whole(self, kind: str, name: str, tensor: torch.Tensor, factor: float = 1.0) -> None:
        """Of this rank's shard; of what several ranks hold alike, of the first one's."""
        rows = own_rows(tensor)
        local, is_counted = (rows.values, rows.is_first) if rows is not None else (tensor, self._world.is_main)
        if not is_counted:
            local = local[:0] if local.ndim else local.new_empty(0)
        self._found.append((kind, name, *_sums(local.detach() * factor if factor != 1.0 else local)))

    def _keys(self) -> list[tuple[str, str]]:
        """The same on all ranks: one of them may have run other layers."""
        own = [[kind, name] for kind, name in dict.fromkeys((kind, name) for kind, name, _, _ in self._found)]
        every = dict.fromkeys((kind, name) for of_rank in self._world.gather(own) for kind, name in of_rank)
        return list(every)

    def _together(self, keys: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = {key: index for index, key in enumerate(keys)}
        device = self._world.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        sums, most = torch.zeros(len(keys), 4, dtype=wide, device=device), torch.zeros(len(keys), device=device)
        for kind, name, values, largest in self._found:
            index = rows[kind, name]
            sums[index] += values.to(device)
            most[index] = torch.maximum(most[index], largest.to(device, most.dtype))
        if self._world.size > 1:
            dist.all_reduce(sums)
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return sums, most


def _sums(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = tensor.flatten().abs() if tensor.is_complex() else tensor.flatten()
    wide = flat if flat.device.type == "mps" else flat.double()
    count = wide.new_full((), wide.numel())
    largest = wide.abs().max() if wide.numel() else wide.new_zeros(())
    return torch.stack([count, wide.sum(), wide.square().sum(), (wide == 0).sum().to(wide.dtype)]), largest


def value_statistics(sums: Sequence[float], largest: float) -> ValueStatistics:
    """From the count, the sum, the sum of squares and the zeros of all values.

    >>> value_statistics([4, 4.0, 20.0, 1], largest=4.0)
    ValueStatistics(mean=1.0, std=2.0, norm=4.47213595499958, largest=4.0, zeros=0.25)
    """
    count, total, squares, zeros = sums
    num = count or 1.0
    mean = total / num
    deviation = math.sqrt(max(0.0, squares / num - mean * mean))
    return ValueStatistics(mean=mean, std=deviation, norm=math.sqrt(squares), largest=largest, zeros=zeros / num)
