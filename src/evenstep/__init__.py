"""Data-parallel training for PyTorch that you can trust: one task, the same result on one device or many."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep import adopt
    from evenstep.data.feature_scaler import Scaler
    from evenstep.errors import EvenstepError
    from evenstep.launcher.launch import train
    from evenstep.launcher.script import launch
    from evenstep.plan import Plan
    from evenstep.record import Record
    from evenstep.sampling import samplers
    from evenstep.task import Task
    from evenstep.training.checkpointed_run import Run
    from evenstep.training.loss_context import gather, log, progress
    from evenstep.training.team import join

__version__ = "0.1.0"
__all__ = [
    "EvenstepError",
    "Plan",
    "Record",
    "Run",
    "Scaler",
    "Task",
    "adopt",
    "gather",
    "join",
    "launch",
    "log",
    "progress",
    "samplers",
    "train",
]

# Found when first asked for: torch takes a second to import, and `evenstep --help` should not wait for it.
_WHERE = {
    # Not public: what Record.model calls, which lies above it.
    "load_model": "evenstep.checkpoint.export",
    "EvenstepError": "evenstep.errors",
    "Plan": "evenstep.plan",
    "Record": "evenstep.record",
    "Run": "evenstep.training.checkpointed_run",
    "Scaler": "evenstep.data.feature_scaler",
    "Task": "evenstep.task",
    "gather": "evenstep.training.loss_context",
    "join": "evenstep.training.team",
    "launch": "evenstep.launcher.script",
    "log": "evenstep.training.loss_context",
    "progress": "evenstep.training.loss_context",
    "train": "evenstep.launcher.launch",
}
_MODULES = {"adopt": "evenstep.adopt", "samplers": "evenstep.sampling.samplers"}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _WHERE:
        raise AttributeError(f"evenstep has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_WHERE[name]), name)
