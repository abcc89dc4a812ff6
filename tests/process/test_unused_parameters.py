"""Parameters without a gradient, on some ranks or on all, in some steps or in all: every strategy equals one device."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import load_file

from evenstep.plan import Plan
from tests.fleet import furthest, newest_weights, result, run_jobs, run_processes
from tests.marks import first_is_quick, num_steps

HERE = Path(__file__).parent
STEPS = num_steps(22, 50)
"""At least two epochs, the last step of each with 3 samples."""
WORLDS = {"single-1": 1, "dp-2": 1, "ddp-2": 2, "ddp-3": 3, "ddp+torch-2": 2, "fsdp-2": 2, "fsdp+torch-2": 2}
"""With `+torch`, nothing goes through shared memory, as between machines."""
KEYS = ("experts/adamw/mean", "experts/sgd/pair", "heads/adamw/pair", "heads/sgd/mean")
CASES = [*product(KEYS, (1, 3)), ("idle/adamw/mean", 1), ("idle/sgd/mean", 1)]
COMPLEX = [("ddp-2", (f"{key}/complex", accumulate)) for key, accumulate in CASES]
"""With torch's DistributedDataParallel and shared memory, as on GPUs of one machine."""
QUICK = [("dp-2", KEYS[0], 3), ("ddp-2", KEYS[0], 1), ("ddp-2", KEYS[3], 3), ("fsdp-2", KEYS[3], 3)]
"""Where, and what, in the default run."""


def plan(where: str, accumulate: int) -> Plan:
    strategy, _, num = where.partition("-")
    return Plan(
        strategy=strategy.removesuffix("+torch"),
        devices=("cpu",) * int(num),
        batch=10,
        steps=STEPS,
        accumulate=accumulate,
        precision="fp64",
        clip=1.0,
        threads=1,
        check_collectives="+torch" in strategy,
    )


def name(where: str, key: str, accumulate: int) -> str:
    return f"{where}_{key.replace('/', '-')}_{accumulate}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("unused")
    items = [item for item in request.session.items if item.path == request.path]
    of_this = [item.callspec.params for item in items if hasattr(item, "callspec")]
    cases = [(one["where"], one["key"], one["accumulate"]) for one in of_this if "accumulate" in one]
    wanted = dict.fromkeys((place, *case[1:]) for case in cases for place in ("single-1", case[0]))
    # The check of collectives replaces functions of torch, for the rest of a process.
    for size, is_torch in ((1, False), (2, False), (2, True), (3, False)):
        chosen = [case for case in wanted if WORLDS[case[0]] == size and ("+torch" in case[0]) == is_torch]
        if chosen:
            run_jobs(folder, size, [(name(*case), plan(case[0], case[2]), case[1]) for case in chosen])
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("where", "key", "accumulate"),
    [
        pytest.param(where, *case, marks=() if (where, *case) in QUICK else pytest.mark.slow)
        for where, case in (*product([where for where in WORLDS if where != "single-1"], CASES), *COMPLEX)
    ],
)
def test_learns_the_same_as_single(trained: Path, where: str, key: str, accumulate: int) -> None:
    single, other = result(trained, name("single-1", key, accumulate)), result(trained, name(where, key, accumulate))
    assert len(single.record.losses) == STEPS
    assert other.record.losses == pytest.approx(single.record.losses, rel=1e-9)
    assert furthest(other.weights, single.weights) < 1e-9
    states = [trained / name(one, key, accumulate) / "checkpoints" / "latest" for one in ("single-1", where)]
    ours, theirs = (load_file(state / "optimizer.safetensors") for state in states)
    assert ours.keys() == theirs.keys()
    assert not any("pooler" in one for one in ours)


@pytest.mark.parametrize("strategy", first_is_quick(["ddp", "dp", "ddp+torch", "fsdp", "fsdp+torch"]))
def test_layers_are_frozen_and_unfrozen_between_steps(tmp_path: Path, strategy: str) -> None:
    for kind, size in (("single", 1), (strategy, 1 if strategy == "dp" else 2)):
        run_processes(HERE / "unfreezing_script.py", [str(tmp_path / kind), kind], size, tmp_path / f"logs-{kind}")
    assert furthest(load_file(tmp_path / strategy), load_file(tmp_path / "single")) < 1e-9


STAGED = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(60, 6)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head, self.spare = nn.Linear(6, 5), nn.Linear(5, 2), nn.Linear(2, 2)
        self.backbone.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))

def after(run):
    if run.epoch == 1:
        run.model.backbone.requires_grad_(True)
        run.model.head.bias.requires_grad_(False)

def task() -> Task:
    return Task(
        model=Net,
        train=(x, (x[:, 0] > 0).long()),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
        batch=9,
        after=after,
    )
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "dp", "fsdp"])
def test_a_run_that_unfroze_layers_is_resumed_with_them(strategy: str) -> None:
    Path("staged.py").write_text(STAGED)
    two = ("--strategy", strategy, "--devices", "cpu,cpu")
    for arguments in (
        ("staged.py", "--epochs", "5", "--name", "whole"),
        ("staged.py", "--epochs", "3", "--name", "first", *two),
        ("staged.py", "--epochs", "5", "--name", "rest", "--resume", "runs/first", *two),
    ):
        command = [sys.executable, "-m", "evenstep", "train", *arguments, "--precision", "fp64"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    ours, theirs = (newest_weights(Path("runs") / name) for name in ("rest", "whole"))
    assert furthest(ours, theirs) < 1e-9
