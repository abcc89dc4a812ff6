"""What fsdp cannot train is refused in words, and what it can is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from evenstep.distributed.world import World
from evenstep.strategies.fsdp import units_apart
from tests.fleet import run_processes

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(200)


def train(task: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of fsdp, unless the options say otherwise."""
    given = {"--strategy": "fsdp", "--devices": "cpu,cpu", "--name": "one"} | dict(
        zip(options[::2], options[1::2], strict=True)
    )
    arguments = [word for pair in given.items() for word in pair]
    command = [sys.executable, "-m", "evenstep", "train", f"{HERE / 'unusual_tasks.py'}:{task}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["heads", "experts"])
def test_layers_that_some_ranks_do_not_use_are_gathered_together(task: str) -> None:
    ended = train(task)
    assert ended.returncode == 0, ended.stderr
    assert "only some ranks have a gradient of" in ended.stderr


def test_a_layer_that_some_ranks_do_not_run_is_named_before_they_send_anything() -> None:
    """A loop gives no sample, from which fsdp would know."""
    Path("loop.py").write_text(LOOP)
    command = [sys.executable, "-m", "evenstep", "run", "--devices", "2", "loop.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode, ended.stderr
    assert "fsdp gathers these layers one by one, and so all ranks run the same ones in every step" in ended.stderr
    assert "runs experts." in ended.stderr
    assert "SIGABRT" not in ended.stderr


LOOP = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import evenstep
from unusual_tasks import experts
task, team = experts(), evenstep.join("fsdp")
model = team.wrap(task.model())
for batch in team.loader(task.train, batch=8):
    team.backward(task.loss, model, batch)
"""


@pytest.mark.slow
def test_a_parameter_that_forward_changes_is_named() -> None:
    ended = train("teacher")
    assert ended.returncode == 2, ended.stderr
    assert "error: forward changes the parameter teacher.weight; under fsdp it has a gathered copy" in ended.stderr


@pytest.mark.slow
def test_a_complex_parameter_is_named_before_the_first_step() -> None:
    ended = train("complex_weights")
    assert ended.returncode == 2, ended.stderr
    assert "error: the parameter filter is complex64, and fsdp trains real ones only;" in ended.stderr


@pytest.mark.slow
def test_an_average_of_weights_is_kept_by_a_task_that_augments() -> None:
    for strategy in ("fsdp", "ddp"):
        ended = train("two_views", "--strategy", strategy, "--name", strategy, "--precision", "fp64")
        assert ended.returncode == 0, ended.stderr
    ours, theirs = (load_file(f"runs/{name}/checkpoints/latest/weights.safetensors") for name in ("fsdp", "ddp"))
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-9, atol=0)


def test_a_parameter_that_is_nan_is_not_taken_for_a_changed_one() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    nn.init.constant_(model[0].bias, torch.nan)
    alone = World(0, 1, (torch.device("cpu"),))
    assert units_apart(model, alone, lambda model: model(torch.ones(1, 3))) == list(model)


REFUSED = {
    "Coupled": "has a relative error of",
    "Keeping": "it keeps a list of each parameter ('history'), and only tensors and numbers are sent",
    "Changing": "it keeps other things of a parameter than after its first update",
    "Failing": "its step fails with ValueError: not again",
    "LBFGS": "LBFGS.step needs a closure",
    "SparseAdam": "names makes sparse gradients (sparse=True)",
}
"""What cannot be done with sharded parameters, nor with those that are whole one at a time."""


@pytest.mark.slow
def test_every_optimizer_is_refused_or_learns_what_one_device_learns(tmp_path: Path) -> None:
    run_processes(HERE / "optimizer_script.py", [str(tmp_path)], 2, tmp_path / "logs")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert {name for name in vars(torch.optim) if name in first} >= {"AdamW", "SGD", "RAdam", "ASGD", "Muon"}
    assert {name: said for name, said in first.items() if isinstance(said, str)}.keys() == REFUSED.keys()
    for name, part in REFUSED.items():
        assert part in first[name]
    assert all(apart < 1e-9 for name, apart in first.items() if name not in {*REFUSED, "Noisy"}), first


def test_a_ledger_finds_the_first_entry_that_differs(tmp_path: Path) -> None:
    run_processes(HERE / "collectives_script.py", [str(tmp_path)], 2, tmp_path / "logs")
    for kind in ("SharedLedger", "SentLedger"):
        found = [json.loads((tmp_path / f"{kind}-{rank}.json").read_text()) for rank in range(2)]
        assert [one["while equal"] for one in found] == [None, None]
        # Where nobody waits, the rank that came first has seen nothing.
        seen = [one["after"] for one in found]
        assert [1, 8000] in seen or [0, 7000] in seen
        assert all(one in (None, expected) for one, expected in zip(seen, ([1, 8000], [0, 7000]), strict=True))
