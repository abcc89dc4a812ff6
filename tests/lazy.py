"""Modules that take seconds to import: every process of `make test` collects all files, and one of them needs these."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Lazy:
    """A module that is imported when something of it is used first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # pytest looks for its fixtures among the names of a file.
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip where one of these packages is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")
