"""Import torch's compiler only when it is needed.

The first step of any optimizer and the constructor of DDP import `torch._dynamo`, and with it sympy: more than a second
in every process, for a "graph break" where there is no graph. Until the compiler is really needed, a stub module
answers these few calls as the real one would in a program that compiles nothing; anything else loads the real one.
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
    """Install the stub, unless the compiler is already loaded."""
    if NAME not in sys.modules:
        sys.modules[NAME] = Stub()
        sys.meta_path.insert(0, _finder)


class Stub(types.ModuleType):
    """The part of torch._dynamo that a program without compilation uses."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__path__: list[str] = []
        self.utils = _Utils("torch._dynamo.utils")
        self.trace_rules = _TraceRules("torch._dynamo.trace_rules")
        self._left_alone: list[Callable[..., Any]] = []

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Nothing: there is no graph."""

    def disable(self, function: Any = None, *_: Any, **__: Any) -> Any:
        """Remember the function, to disable compilation for it once the compiler is loaded."""
        if function is not None:
            self._left_alone.append(function)
        return function if function is not None else self.disable

    def load_real(self) -> types.ModuleType:
        """Load the real module, which then disables the remembered functions."""
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
        return getattr(self.load_real(), name)


class _Part(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


class _Utils(_Part):
    def get_optimize_ddp_mode(self) -> str:
        """The real module's default."""
        return "ddp_optimizer"


class _TraceRules(_Part):
    def clear_lru_cache(self) -> None:
        """Nothing: there is no cache."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """On the import of a submodule, load the real compiler and return that submodule."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        stub = sys.modules.get(NAME)
        if not name.startswith(f"{NAME}.") or not isinstance(stub, Stub):
            return None
        stub.load_real()
        importlib.import_module(name)
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the module was executed when it was imported."""


_finder = _Finder()
