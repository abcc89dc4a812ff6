"""Gradients that share memory are those of one device, alone: nothing is added, averaged or clipped twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import evenstep
from tests.fleet import run_processes
from tests.marks import first_is_quick
from tests.process.tied_gradients_script import errors

HERE = Path(__file__).parent


@pytest.mark.parametrize(("strategy", "num"), [("single", 1), ("dp", 2), ("dp", 3)])
def test_in_one_process(strategy: str, num: int) -> None:
    found = errors(evenstep.join(strategy, ("cpu",) * num))
    assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("strategy", first_is_quick(["ddp", "fsdp"]))
def test_in_two_processes(strategy: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_processes(HERE / "tied_gradients_script.py", [str(out), strategy], 2, tmp_path / "logs")
    every = json.loads(out.read_text())
    assert len(every) == 2
    for found in every:
        assert max(found.values()) < 1e-6, found
