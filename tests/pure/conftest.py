"""The command in this process, and settings of the property tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from evenstep.cli import main
from tests import marks

# Machines that run tests are often busy: how long an example took says nothing.
settings.register_profile("evenstep", deadline=None, database=None, max_examples=marks.num_examples(100))
settings.load_profile("evenstep")


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


@pytest.fixture
def evenstep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`evenstep("train", "digits")` is the command line, run in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["evenstep", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Ended(int(ended.value.code or 0), said.out, said.err)

    return command


@pytest.fixture(autouse=True)
def _own_imports(tmp_path: Path) -> Iterator[None]:
    """A file of one test's folder that was imported is not there for the next one."""
    path, before = list(sys.path), sys.modules.copy()
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if before.get(name) is not module and str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
