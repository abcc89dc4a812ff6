"""What a run that was never disturbed has learned, and a Slurm to run under."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.runs import train, weights
from tests.faults.slurm_cluster import Cluster, slurm, why_no_slurm


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """`undisturbed("--workers", "2")`: the last weights of such a run; each one is trained once."""
    known: dict[tuple[object, ...], bytes] = {}

    def learned(*options: str, **choices: object) -> bytes:
        key = (options, *sorted(choices.items()))
        if key not in known:
            before, folder = Path.cwd(), tmp_path_factory.mktemp("undisturbed")
            os.chdir(folder)
            try:
                ended = train(*options, **choices)  # type: ignore[arg-type]
                assert ended.code == 0, ended.err
                known[key] = weights()
            finally:
                os.chdir(before)
        return known[key]

    return learned


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A real one, for the tests of one file."""
    if missing := why_no_slurm():
        pytest.skip(missing)
    with slurm() as running:
        yield running
