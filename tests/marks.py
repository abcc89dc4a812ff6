"""Which cases of a test run with `make test`, and which with `make test-all` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_is_quick = False


def set_quick(config: pytest.Config) -> None:
    """Before files are collected: whether what is slow is left out."""
    global _is_quick
    _is_quick = "not slow" in config.option.markexpr


def num_examples(num: int) -> int:
    """How many examples of a property are tried: all with `make test-all`, a quarter of them with `make test`."""
    return num // 4 if _is_quick else num


def num_steps(quick: int, whole: int) -> int:
    """How long trainings are: `whole` with `make test-all`, `quick` with `make test`."""
    return quick if _is_quick else whole


def first_is_quick(cases: Iterable[Any], num_quick: int = 1) -> list[Any]:
    """The cases, of which all but the first run with `make test-all` only; a tuple is a case of several arguments."""
    return [
        case
        if index < num_quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
