"""`--mesh fsdp=2,tensor=2`: what ranks hold of a split model that replicas shard, and where its runs go on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenstep.plan import Plan
from tests.fleet import bits_of, furthest, newest_weights, run_jobs, run_processes
from tests.process.test_hsdp import TASK

SCRIPT = Path(__file__).with_name("sharded_tensor_script.py")
MESH = "fsdp=2,tensor=2"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded")
    run_processes(SCRIPT, [str(folder)], 4, folder / "logs")
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return found


def test_a_rank_holds_a_quarter_of_what_is_split_and_half_of_the_rest(seen: dict[str, Any]) -> None:
    whole = seen["whole"]
    split = {"up.weight": 4, "up.bias": 4}
    for of_rank in [*seen["held"], *seen["state"]]:
        assert {name: of_rank[name] * parts for name, parts in split.items()} == {name: whole[name] for name in split}
        assert of_rank["norm.weight"] * 2 == whole["norm.weight"]
    # Three rows, cut into two and one.
    assert [of_rank["down.weight"] for of_rank in seen["held"]] == [16, 16, 8, 8]


def test_gradients_of_a_whole_layer_that_heads_share_are_summed(seen: dict[str, Any]) -> None:
    assert seen["difference"] < 1e-12


def test_an_optimizer_that_needs_whole_matrices_is_refused(seen: dict[str, Any]) -> None:
    assert seen["refused"].startswith("Adafactor cannot update parts of parameters as it updates whole ones")


@pytest.mark.slow
def test_a_run_goes_on_under_other_strategies(tmp_path: Path) -> None:
    key, last = "encoder/adamw/pair", 11
    chain = [
        ("single", 1, None, None),
        ("tensor", 4, MESH, "single"),
        ("fsdp", 2, None, f"tensor-{MESH}"),
        ("tensor", 2, "tensor=2", f"tensor-{MESH}"),
        ("ddp", 2, None, f"tensor-{MESH}"),
    ]
    for strategy, size, mesh, before in chain:
        name = f"{strategy}-{mesh}" if mesh else strategy
        start = None if before is None else 3 if before == "single" else 7
        resume = None if before is None else str(tmp_path / before / "checkpoints" / f"step-{start:08d}")
        plan = Plan(
            strategy=strategy,
            devices=("cpu",) * size,
            mesh=mesh,
            batch=10,
            steps=last,
            precision="fp64",
            clip=0.5,
            threads=1,
            checkpoint_every=1,
            keep=99,
            check_every=2,
        )
        run_jobs(tmp_path, size, [(name, replace(plan, resume=resume), key)])
        assert furthest(newest_weights(tmp_path / name), newest_weights(tmp_path / "single")) < 1e-9, name
        assert bits_of(tmp_path / name).keys() == bits_of(tmp_path / "single").keys()


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("more", [("verify", "--steps", "3"), ("compare", "--steps", "4", "--rounds", "1")])
def test_verify_and_compare_take_the_mesh(more: tuple[str, ...]) -> None:
    Path("my_task.py").write_text(TASK)
    where = ["my_task.py", "--strategies", "tensor", "--devices", "4", "--mesh", MESH]
    command = [sys.executable, "-m", "evenstep", more[0], *where, *more[1:]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-3000:]
    assert f"tensor x 4, {MESH}" in said
    assert ("all strategies match single" if more[0] == "verify" else "✓ same") in said
