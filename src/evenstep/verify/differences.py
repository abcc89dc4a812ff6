"""How far two runs of the same training are apart, tensor by tensor, each relative to its own size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from evenstep import checkpoint
from evenstep.verify.evidence import Evidence, Tensors
from evenstep.worker.witness import sampled

Limit = Callable[[str, str], float]
"""How far a part's tensor may be off."""


@dataclass(frozen=True)
class Difference:
    """One number: after `step` steps, `name` of `part` is off by `size`, relative to the largest of its numbers."""

    part: str
    step: int
    name: str
    size: float


@dataclass(frozen=True)
class Guard:
    """What is too small to say anything.

    A gradient whose true value is zero is computed as rounding noise (the bias of attention's keys, which softmax
    cancels). Adam divides noise by its own size and takes full steps with it, so such weights differ by far, and
    nothing is learned by them.
    """

    element: float
    """Where a gradient's element is below this part of its tensor's largest, weight and state are not judged."""
    tensor: float
    """No tensor is taken to be smaller than this part of the largest of its kind."""


FINE = Guard(1e-6, 1e-6)
COARSE = Guard(1e-2, 1e-3)


class Differ:
    """Compares runs; what it once found to be noise stays left out."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._noise: dict[str, torch.Tensor] = {}

    @property
    def silent(self) -> list[str]:
        """Parameters of which no element had a true gradient."""
        return [name for name, noise in self._noise.items() if bool(noise.all())]

    def all(self, one: Evidence, other: Evidence) -> list[Difference]:
        """In the order in which they come to be; steps that only one of them has are not compared."""
        found: list[Difference] = []
        for step in sorted(set(one.steps) & set(other.steps)):
            found += self._samples(one, other, step)
            found += self._step(one.tensors(step), other.tensors(step), step, one, other)
        return [*found, *_evaluations(one, other)]

    def _samples(self, one: Evidence, other: Evidence, step: int) -> list[Difference]:
        is_same = sorted(one.ids.get(step, [])) == sorted(other.ids.get(step, []))
        return [Difference("samples", step, "samples", 0.0 if is_same else math.inf)]

    def _step(
        self, one: Tensors, other: Tensors, step: int, of_one: Evidence, of_other: Evidence
    ) -> Iterator[Difference]:
        # A run that goes on from a checkpoint begins elsewhere.
        if _ordered("start", one, {}) and _ordered("start", {}, other):
            for name, size in self._kind("start", one, other):
                yield Difference("weights", 0, name, size)
        losses = [of_one.losses[step], of_other.losses[step]]
        largest = max(map(abs, of_one.losses.values()))
        yield Difference("loss", step, "loss", abs(losses[0] - losses[1]) / max(largest, 1e-300))
        for name, size in self._kind("gradient", one, other):
            yield Difference("gradients", step, name, size)
        self._listen(one, other)
        for kind, part in (("weight", "weights"), ("buffer", "weights"), ("optimizer", "optimizer")):
            for name, size in self._kind(kind, one, other):
                yield Difference(part, step, name, size)

    def _kind(self, kind: str, one: Tensors, other: Tensors) -> Iterator[tuple[str, float]]:
        """Every tensor of a kind, in the model's order."""
        keys = _ordered(kind, one, other)
        floor = self._guard.tensor * _largest([one[key] for key in keys if key in one])
        for key in keys:
            name = key.partition("/")[2]
            sizes = [self._size(kind, name, one.get(key), other.get(key), floor)]
            norms = (one.get(f"norm/{key}"), other.get(f"norm/{key}"))
            if norms[0] is not None and norms[1] is not None and not self._is_noisy(name):
                sizes.append(abs(float(norms[0] - norms[1])) / max(float(norms[0]), floor, 1e-300))
            yield name, max(sizes)

    def _size(self, kind: str, name: str, one: torch.Tensor | None, other: torch.Tensor | None, floor: float) -> float:
        if one is None or other is None:
            present = one if one is not None else other
            assert present is not None
            # No gradient and a gradient of zeros are the same; state is made with the first gradient.
            return 0.0 if kind == "optimizer" or not bool(present.any()) else math.inf
        if one.shape != other.shape:
            return math.inf
        if not one.is_floating_point():
            return 0.0 if torch.equal(one, other) else math.inf
        apart = (one.double() - other.double()).abs()
        # Both may hold an infinity in the same places: a mask, say.
        apart = apart.masked_fill(one == other, 0.0)
        noise = self._noise.get(name if kind != "optimizer" else name.rpartition("/")[0])
        if kind in ("weight", "optimizer") and noise is not None and noise.shape == apart.shape:
            apart = apart.masked_fill(noise, 0.0)
        if apart.numel() == 0:
            return 0.0
        size = float(apart.max()) / max(_largest([one]), _largest([other]), floor if kind != "optimizer" else 0, 1e-300)
        return size if math.isfinite(size) else math.inf

    def _listen(self, one: Tensors, other: Tensors) -> None:
        """Note which elements had nothing but noise for a gradient."""
        keys = _ordered("gradient", one, other)
        floor = self._guard.tensor * _largest([one[key] for key in keys if key in one])
        for key in keys:
            if key in one and key in other and one[key].shape == other[key].shape:
                name = key.partition("/")[2]
                most = self._guard.element * max(_largest([one[key]]), floor)
                # What is exactly zero in both moves nothing.
                noise = (one[key].abs() <= most) & (other[key].abs() <= most) & ((one[key] != 0) | (other[key] != 0))
                self._noise[name] = noise | self._noise.get(name, torch.zeros_like(noise))

    def _is_noisy(self, name: str) -> bool:
        noise = self._noise.get(name, self._noise.get(name.rpartition("/")[0]))
        return noise is not None and bool(noise.any())


def saved_as_trained(run: Evidence, step: int) -> list[Difference]:
    """Whether a checkpoint holds the very numbers that the run had at that step."""
    tensors = run.tensors(step)
    saved = {
        **{f"weight/{key}": value for key, value in load_file(run.checkpoint(step) / checkpoint.WEIGHTS).items()},
        **{f"optimizer/{key}": value for key, value in load_file(run.checkpoint(step) / checkpoint.OPTIMIZER).items()},
    }
    found = []
    for key, value in saved.items():
        trained = tensors.get(key, tensors.get(key.replace("weight/", "buffer/", 1)))
        if trained is not None:
            kept = sampled(key, value)[key]
            is_same = kept.shape == trained.shape and torch.equal(kept.nan_to_num(), trained.nan_to_num())
            name = key.partition("/")[2]
            found.append(Difference("checkpoint", step, name, 0.0 if is_same else math.inf))
    return found


def has_checkpoint(run: Evidence, step: int) -> bool:
    """Whether the run saved that step."""
    path: Path = run.checkpoint(step)
    return path.is_dir()


def first_beyond(found: Sequence[Difference], limit: Limit) -> Difference | None:
    """The first difference that is more than rounding."""
    return next((one for one in found if one.size > limit(one.part, one.name)), None)


def _evaluations(one: Evidence, other: Evidence) -> Iterator[Difference]:
    for first, second in zip(one.record.evaluations, other.record.evaluations, strict=False):
        if first.step != second.step:
            continue
        for name, value in first.values.items():
            found = second.values.get(name, math.nan)
            if math.isnan(value) and math.isnan(found):
                continue
            size = abs(value - found) / max(abs(value), abs(found), 1e-12)
            if name != "loss" and _is_one_sample(value - found, first.samples):
                size = 0.0
            yield Difference("evaluation", first.step, name, size if math.isfinite(size) else math.inf)


def _is_one_sample(apart: float, num_samples: int) -> bool:
    """Whether one sample's answer fell to the other side: two scores were alike but for rounding."""
    return abs(abs(apart) * num_samples - 1) < 1e-6


def _ordered(kind: str, one: Tensors, other: Tensors) -> list[str]:
    return [key for key in dict.fromkeys([*one, *other]) if key.startswith(f"{kind}/")]


def _largest(tensors: Sequence[torch.Tensor]) -> float:
    sizes = [tensor[torch.isfinite(tensor)].abs() for tensor in tensors if tensor.is_floating_point()]
    return max((float(size.max()) for size in sizes if size.numel()), default=0.0)
