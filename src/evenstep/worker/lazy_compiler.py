"""torch's compiler, loaded when it is needed and not before.

The first step of any optimizer and the constructor of DDP import `torch._dynamo`, and with it sympy: more than a second
in every process, to ask it for a "graph break" where no graph is. Until someone really needs the compiler, a stand-in
answers those few questions as the real one would in a program that compiles nothing; whatever else it is asked for, it
makes way.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

NAME = "torch._dynamo"


def put_off_compiler() -> None:
    """Put the stand-in in its place; nothing, if the compiler is loaded already."""
    if NAME not in sys.modules:
        sys.modules[NAME] = StandIn()
        sys.meta_path.insert(0, _finder)


class StandIn(types.ModuleType):
    """What a program that compiles nothing asks of torch._dynamo."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__path__: list[str] = []
        self.utils = _Utils("torch._dynamo.utils")
        self.trace_rules = _TraceRules("torch._dynamo.trace_rules")
        self._left_alone: list[Callable[..., Any]] = []

    def graph_break(self, *_: Any, **__: Any) -> None:
        """There is no graph."""

    def disable(self, function: Any = None, *_: Any, **__: Any) -> Any:
        """Nothing to switch off; remembered, for when there is."""
        if function is not None:
            self._left_alone.append(function)
        return function if function is not None else self.disable

    def make_way(self) -> types.ModuleType:
        """Load the real one; functions that were left alone are then switched off by it."""
        if sys.modules.get(NAME) is self:
            sys.meta_path.remove(_finder)
            del sys.modules[NAME]
            for function in self._left_alone:
                if hasattr(function, "__dynamo_disable"):
                    delattr(function, "__dynamo_disable")
        return importlib.import_module(NAME)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.make_way(), name)


class _Part(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


class _Utils(_Part):
    def get_optimize_ddp_mode(self) -> str:
        """What the real one says where nothing was set."""
        return "ddp_optimizer"


class _TraceRules(_Part):
    def clear_lru_cache(self) -> None:
        """Nothing was kept."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A part of the compiler is imported: load all of it, and give that part."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        standing_in = sys.modules.get(NAME)
        if not name.startswith(f"{NAME}.") or not isinstance(standing_in, StandIn):
            return None
        standing_in.make_way()
        importlib.import_module(name)
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """It was executed when it was imported."""


_finder = _Finder()
