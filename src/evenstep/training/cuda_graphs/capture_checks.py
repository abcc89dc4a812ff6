"""What decides whether a step is replayed: the Python state that it reads, the tensors that it changes, and its time.

Python values that change from step to step would not change in a replay. A replay must change every tensor as the eager
step does, and must not be slower.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from evenstep.private_apis import scaler_tensors
from evenstep.training.step import Recipe

Seen = dict[str, Any]
_PLAIN = (int, float, bool, str, bytes, type(None))
_MANY = (list, dict, set, tuple)
_OF_TORCH = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


def seen(loss: Callable[..., Any], model: nn.Module) -> Seen:
    """Names and values of that state, as far as it can be found; for collections, their length."""
    found: Seen = {}
    for name, weight in model.named_parameters():
        found |= {f"requires_grad of {name}": weight.requires_grad, f"the memory of {name}": weight.data_ptr()}
    for name, layer in model.named_modules():
        for key, value in vars(layer).items():
            if key not in _OF_TORCH:
                found |= _value_of(f"{name}.{key}".lstrip("."), value)
    for function in (loss, *(type(layer).forward for layer in model.modules())):
        for name, value in _around(function):
            found |= _value_of(name, value)
    found["Python's random numbers"] = hash(random.getstate())
    state: Any = np.random.get_state(legacy=False)
    found["NumPy's random numbers"] = (state["state"]["key"].tobytes(), state["state"]["pos"])
    return found


def drew_on_host() -> bool:
    """Whether torch's CPU generator was used since it was seeded for this step."""
    seeded = torch.Generator().manual_seed(torch.default_generator.initial_seed())
    return not torch.equal(seeded.get_state(), torch.default_generator.get_state())


def first_change(before: Seen, after: Seen) -> str | None:
    """The first name whose value changed."""
    return next((name for name in (*before, *after) if before.get(name, _PLAIN) != after.get(name, _PLAIN)), None)


def _value_of(name: str, value: Any) -> Seen:
    if isinstance(value, _PLAIN):
        return {name: value}
    if isinstance(value, _MANY) or hasattr(value, "maxlen"):
        return {f"{name} (its length)": len(value)}
    return {}


def _around(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function refers to: its closure, the globals it names, and the object of a method."""
    if isinstance(function, MethodType):
        yield from ((f"{key} of {type(function.__self__).__name__}", v) for key, v in _variables(function.__self__))
        function = function.__func__
    if not isinstance(function, FunctionType):
        yield from ((f"{key} of {type(function).__name__}", value) for key, value in _variables(function))
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    module = function.__globals__
    yield from ((name, module[name]) for name in _names(function.__code__) if name in module)


def _variables(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


BLOCK = 3
"""Steps of a trial that are taken in one way before the other has its turn."""
JUDGED = 4
"""Steps of each kind that decide."""
MOST_TRIED = 500
"""Steps of a trial after which fewer decide."""
MOST_APART = 0.02
"""Fraction of numbers that may differ: Adam takes full steps even where a gradient is only rounding."""
LAST_DIGITS = 4
"""Allowed difference of any number, in units in the last place."""

Kinds = dict[str, list[torch.Tensor]]


def changed_by(recipe: Recipe) -> Kinds:
    """What a step changes, by kind: weights, buffers, and whatever the optimizer and fp16's scaler keep."""
    kinds: Kinds = {"the weights": [weight.detach() for weight in recipe.model.weights]}
    for buffer in recipe.model.module.buffers():
        kinds.setdefault("the buffers" if buffer.is_floating_point() else "the counts", []).append(buffer)
    for state in recipe.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                kinds.setdefault(f"the optimizer's {name}", []).append(value)
    scaler = recipe.team.precision.scaler
    if scaler is not None:
        kinds.setdefault("the scale", []).extend(scaler_tensors(scaler))
    return kinds


def num_bytes(kinds: Kinds) -> int:
    """The total."""
    return sum(tensor.nbytes for tensors in kinds.values() for tensor in tensors)


def copied(kinds: Kinds) -> Kinds:
    """Copies on the host: GPU memory belongs to the training."""
    return {kind: [tensor.detach().to("cpu", copy=True) for tensor in tensors] for kind, tensors in kinds.items()}


@torch.no_grad()
def put(targets: Kinds, sources: Kinds) -> None:
    """Copy the sources into the targets."""
    for kind, tensors in targets.items():
        for target, source in zip(tensors, sources[kind], strict=True):
            target.copy_(source)


def are_equal(one: Kinds, other: Kinds) -> bool:
    """Whether they are bit-equal."""
    return all(
        torch.equal(first, second.to(first.device))
        for kind, tensors in one.items()
        for first, second in zip(tensors, other[kind], strict=True)
    )


def first_apart(before: Kinds, after: Kinds, now: Kinds, tolerance: float) -> str | None:
    """The first kind whose change from `before` differs from that to `after` by more than this share of it."""
    for kind, tensors in now.items():
        change, num = 0.0, 0
        for start, ended in zip(before[kind], after[kind], strict=True):
            change += float((ended.double() - start.double()).square().sum())
            num += ended.numel()
        limit = tolerance * math.sqrt(change / max(1, num))
        off = sum(_num_beyond(limit, *pair) for pair in zip(after[kind], tensors, strict=True))
        if off > MOST_APART * num:
            return kind
    return None


def _num_beyond(limit: float, ended: torch.Tensor, now: torch.Tensor) -> int:
    digits = LAST_DIGITS * torch.finfo(ended.dtype).eps if ended.is_floating_point() else 0.0
    distance = (ended.double() - now.cpu().double()).abs()
    # Not "above the limit": NaN is above nothing.
    return int((~(distance <= limit + digits * ended.double().abs())).sum())


class ReplayTrial:
    """How long eager steps and replays take, as the run takes them: blocks by turns, from the end of one step on the
    GPU to the end of the next, so that it includes what the host does in between.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._before: tuple[torch.cuda.Event, bool] | None = None
        self._intervals: list[tuple[Any, bool, torch.cuda.Event, torch.cuda.Event]] = []
        self._counts: Counter[tuple[Any, bool]] = Counter()

    @property
    def replays(self) -> bool:
        """Whether the next step is to be a replay: two blocks of each, in the order A B B A."""
        return self._num_steps // BLOCK % 4 in (0, 3)

    def add(self, shapes: Any, is_replay: bool) -> None:
        """A step was launched; None stands for shapes that have no graph."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        # The host is ahead of the GPU by another time after a step of the other kind.
        if self._before is not None and self._before[1] == is_replay and shapes is not None:
            self._intervals.append((shapes, is_replay, self._before[0], event))
            self._counts[shapes, is_replay] += 1
        self._before = event, is_replay
        self._num_steps += 1

    @property
    def is_over(self) -> bool:
        """Whether enough steps of one shape were timed, both ways."""
        if self._num_steps % BLOCK:
            return False
        enough = JUDGED if self._num_steps < MOST_TRIED else 1
        return any(min(self._counts[shapes, kind] for kind in (True, False)) >= enough for shapes, _ in self._counts)

    def seconds(self) -> tuple[float, float]:
        """Of an eager step and of a replay, of the shape that came most often."""
        shapes, _ = max(self._counts, key=lambda one: min(self._counts[one[0], kind] for kind in (True, False)))
        self._intervals[-1][-1].synchronize()
        found = {
            kind: median(
                begin.elapsed_time(end) / 1000 for one, of, begin, end in self._intervals if (one, of) == (shapes, kind)
            )
            for kind in (False, True)
        }
        return found[False], found[True]
