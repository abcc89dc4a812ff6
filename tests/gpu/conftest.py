"""What tests on a GPU have in common."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _graphs_are_kept_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a captured step is faster depends on what else uses the GPU; its losses and weights do not."""
    monkeypatch.setattr("evenstep.training.cuda_graphs.runner.LEAST_GAIN", 0.0)
