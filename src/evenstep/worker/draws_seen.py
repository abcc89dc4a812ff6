"""Who draws random numbers, and on which line of the user's: seen while a function of theirs runs."""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from evenstep.seeding import generator_states

MOST_PLACES = 3
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep


class DrawsSeen(TorchFunctionMode):
    """While it is entered, notes which generators move, and the user's lines that draw.

    A mode of functions, as NarrowSeen is; that an operation draws is seen by the generators that it moves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.generators: list[str] = []
        self._states: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        states = torch_states()
        if not same_torch(states, self._states):
            self._note(traceback.extract_stack())
        self._states = states
        return result

    def _note(self, stack: traceback.StackSummary) -> None:
        place = innermost(stack)
        if place is not None and place not in self.places and len(self.places) < MOST_PLACES:
            self.places.append(place)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Everything that runs inside."""
        python, numpy, _ = generator_states()
        own = self._states = torch_states()
        outside = sys.getprofile()
        sys.setprofile(self._called)
        try:
            with self:
                yield
        finally:
            sys.setprofile(outside)
            moved = {
                "Python's": python != random.getstate(),
                "NumPy's": not _same_numpy(numpy, np.random.get_state()),
                "torch's": not same_torch(own, torch_states()),
            }
            self.generators = [name for name, has_moved in moved.items() if has_moved]

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and _generator_of(argument):
            self._note(traceback.extract_stack(frame))


def _generator_of(function: Callable[..., Any]) -> bool:
    owner = getattr(function, "__self__", None)
    return owner is getattr(random, "_inst", None) or owner is getattr(np.random.mtrand, "_rand", None)


def torch_states() -> list[torch.Tensor]:
    """Those of the CPU and of every card that was used."""
    with torch._C.DisableTorchFunction():
        cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return [torch.get_rng_state(), *cards]


def same_torch(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether torch drew nothing in between."""
    with torch._C.DisableTorchFunction():
        # A card that was first used in between had nothing drawn before.
        return all(a.equal(b) for a, b in zip(one, other, strict=False))


def innermost(stack: traceback.StackSummary) -> str | None:
    """The line nearest to what happened: the user's, or that of a library between them and torch."""
    shown = [frame for frame in stack if _is_shown(frame.filename)]
    return f"{short_path(shown[-1].filename)}:{shown[-1].lineno}: {shown[-1].line}" if shown else None


def _is_shown(filename: str) -> bool:
    """Whether a file is neither ours, torch's nor Python's own."""
    is_pythons = filename.startswith(_PYTHON) and f"{os.sep}site-packages{os.sep}" not in filename
    return not (is_pythons or filename.startswith(("<", _OURS, _TORCH)))


def short_path(path: str) -> str:
    """As seen from the folder that one is in, or from that of installed packages."""
    _, _, installed = path.rpartition(f"{os.sep}site-packages{os.sep}")
    near = os.path.relpath(path)
    return installed if installed != path else path if near.startswith("..") else near


def _same_numpy(one: Any, other: Any) -> bool:
    return bool(one[2:] == other[2:] and np.array_equal(one[1], other[1]))
