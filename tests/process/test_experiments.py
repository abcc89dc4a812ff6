"""What a task shows when it is taken apart on one device: the cause that each experiment confirms, or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenstep.verify.causes import buffers, draws, hooks, loss
from evenstep.verify.verdict_table import DifferenceCause

ROOT = Path(__file__).parents[2]
CASES = {
    # A star: it is taken to compute in fewer digits than it is asked to, as the loss of Hugging Face's models does.
    "padded_gpt2:fp64*": "mean-of-means",
    "mixtral:fp32*": "batch-dependent",
    "opt:fp64*": "draws",
    "quantized:fp32*": "buffer",
    "counted_samples:fp64": "buffer",
    "token_mean:fp64": "mean-of-means",
    "token_mean:fp32*": "mean-of-means",
    "token_mean:bf16*": "mean-of-means",
    "contrastive:bf16*": "batch-dependent",
    "clipping_hook:fp64": "gradient-hook",
    "clipping_hook:fp32*": "gradient-hook",
    "summed:fp32*": "sum",
    "gpt2:fp64*": None,
    "bert:fp32*": None,
    "attentive:bf16*": None,
    "cnn:fp32*": None,
    "complex_weights:fp64*": None,
    "deciding:fp32*": None,
    "frozen_norm:fp64": None,
}


@pytest.fixture(scope="module")
def findings() -> dict[str, Any]:
    """One process for all of them: transformers takes seconds to import."""
    script = str(Path(__file__).with_name("experiments_script.py"))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, script, *CASES], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def causes(found: dict[str, Any], is_rough: bool) -> Iterator[DifferenceCause | None]:
    """In the order in which they are looked for."""
    yield draws(found, is_rough)
    yield buffers(found, is_cut=False, differing=found["buffers"]["by_data"])
    yield loss(found)
    yield hooks(found)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "name"), CASES.items())
def test_a_task_taken_apart_shows_its_cause_or_none(findings: dict[str, Any], case: str, name: str | None) -> None:
    found = findings[case]
    assert "problems" not in found
    confirmed = next((cause for cause in causes(found, case.endswith("*")) if cause is not None), None)
    assert (confirmed.name if confirmed is not None else None) == name, found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_layer_that_is_skipped_is_told_with_the_line_that_draws(findings: dict[str, Any]) -> None:
    cause = draws(findings["opt:fp64*"], is_rough=True)
    assert cause is not None
    assert "modeling_opt.py" in cause.sentence
    assert "torch.rand([])" in cause.sentence
    assert cause.sentence.endswith("so each device skips different parameters")
    assert "layerdrop=0" in cause.advice
