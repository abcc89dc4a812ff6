"""What the model and the loss keep in Python: numbers that change from step to step would not change in a replay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

Seen = dict[str, Any]
_PLAIN = (int, float, bool, str, bytes, type(None))
_MANY = (list, dict, set, tuple)
_OF_TORCH = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


def seen(loss: Callable[..., Any], model: nn.Module) -> Seen:
    """Names and values of all of it, as far as it can be found; of collections, their length."""
    found: Seen = {f"requires_grad of {name}": weight.requires_grad for name, weight in model.named_parameters()}
    for name, layer in model.named_modules():
        for key, value in vars(layer).items():
            if key not in _OF_TORCH:
                found |= _told(f"{name}.{key}".lstrip("."), value)
    for function in (loss, *(type(layer).forward for layer in model.modules())):
        for name, value in _around(function):
            found |= _told(name, value)
    found["Python's random numbers"] = hash(random.getstate())
    state: Any = np.random.get_state(legacy=False)
    found["NumPy's random numbers"] = (state["state"]["key"].tobytes(), state["state"]["pos"])
    return found


def drew_on_host() -> bool:
    """Whether torch's own generator of the host was used since it was seeded, as it is at every step."""
    seeded = torch.Generator().manual_seed(torch.default_generator.initial_seed())
    return not torch.equal(seeded.get_state(), torch.default_generator.get_state())


def first_change(before: Seen, after: Seen) -> str | None:
    """The first name that stands for something else now."""
    return next((name for name in (*before, *after) if before.get(name, _PLAIN) != after.get(name, _PLAIN)), None)


def _told(name: str, value: Any) -> Seen:
    if isinstance(value, _PLAIN):
        return {name: value}
    if isinstance(value, _MANY) or hasattr(value, "maxlen"):
        return {f"{name} (its length)": len(value)}
    return {}


def _around(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function sees outside itself: its closure, the globals that it names, and what a method belongs to."""
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
