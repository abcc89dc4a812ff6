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
from torch.utils._python_dispatch import TorchDispatchMode

from evenstep.seeding import generator_states
from evenstep.task import is_users

MOST_PLACES = 3


class DrawsSeen(TorchDispatchMode):
    """While it is entered, notes which generators move, and the user's lines that draw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: list[str] = []
        self.generators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention is tagged too, dropout or not.
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func):
            self._note(traceback.extract_stack())
        return func(*args, **(kwargs or {}))

    def _note(self, stack: traceback.StackSummary) -> None:
        own = [frame for frame in stack if is_users(frame.filename)]
        if own:
            place = f"{short_path(own[-1].filename)}:{own[-1].lineno}: {own[-1].line}"
            if place not in self.places and len(self.places) < MOST_PLACES:
                self.places.append(place)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Everything that runs inside."""
        before = generator_states()
        sys.setprofile(self._called)
        try:
            with self:
                yield
        finally:
            sys.setprofile(None)
            after = generator_states()
            self.generators = [
                name
                for name, moved in (
                    ("Python's", before[0] != after[0]),
                    ("NumPy's", not _same_numpy(before[1], after[1])),
                    ("torch's", not before[2].equal(after[2])),
                )
                if moved
            ]

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and _generator_of(argument):
            self._note(traceback.extract_stack(frame))


def _generator_of(function: Callable[..., Any]) -> bool:
    owner = getattr(function, "__self__", None)
    return owner is getattr(random, "_inst", None) or owner is getattr(np.random.mtrand, "_rand", None)


def short_path(path: str) -> str:
    """As seen from the folder that one is in, or from that of installed packages."""
    _, _, installed = path.rpartition(f"{os.sep}site-packages{os.sep}")
    near = os.path.relpath(path)
    return installed if installed != path else path if near.startswith("..") else near


def _same_numpy(one: Any, other: Any) -> bool:
    return bool(one[2:] == other[2:] and np.array_equal(one[1], other[1]))
