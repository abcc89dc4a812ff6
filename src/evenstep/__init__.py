"""Data-parallel training for PyTorch that you can trust: one task, the same result on one device or many."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from evenstep.errors import EvenstepError
from evenstep.plan import Plan
from evenstep.record import Record
from evenstep.task import Task

if TYPE_CHECKING:
    from evenstep.launch.train import train
    from evenstep.worker.run import Run
    from evenstep.worker.team import join

__all__ = ["EvenstepError", "Plan", "Record", "Run", "Task", "join", "train"]

# These need torch, which takes a second to import; `evenstep --help` should not.
_LATER = {"Run": "evenstep.worker.run", "join": "evenstep.worker.team", "train": "evenstep.launch.train"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"evenstep has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_LATER[name]), name)
