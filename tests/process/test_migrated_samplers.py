"""`DistributedSampler(dataset)`, left over from a DDP script: in a task, and in a custom loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.record import Record

TASK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from evenstep import Task

data = TensorDataset(torch.randn(23, 4))
valid = DataLoader(data, batch_size=6, sampler=DistributedSampler(data, shuffle=False))

def task() -> Task:
    return Task(
        model=lambda: nn.Linear(4, 1),
        train=DataLoader(data, batch_size=6, sampler=DistributedSampler(data)),
        valid=valid,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
"""
LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import evenstep

team = evenstep.join()
data = TensorDataset(torch.randn(23, 4))
loader = team.loader(DataLoader(data, batch_size=6, sampler=DistributedSampler(data)))
ids = [batch.ids.tolist() for batch in loader]
every = team.world.gather(ids)
if team.world.is_main:
    print(every)
"""
slow = pytest.mark.slow


def command(*words: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "evenstep", *words]
    return subprocess.run(run, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("strategy", [pytest.param("dp", marks=slow), "ddp", pytest.param("fsdp", marks=slow)])
def test_a_task_needs_no_process_group_for_it_and_trains_as_on_one_device(strategy: str) -> None:
    Path("my_task.py").write_text(TASK)
    options = ("--precision", "fp64", "--epochs", "3", "--audit")
    one = command("train", "my_task.py", *options, "--name", "one")
    assert one.returncode == 0, one.stderr
    assert "the train DataLoader's DistributedSampler is not needed: each rank gets its share" in one.stderr
    two = command("train", "my_task.py", *options, "--name", "two", "--strategy", strategy, "--devices", "cpu,cpu")
    assert two.returncode == 0, two.stderr
    assert "23 samples x 3 epochs, 0 repeated, 0 missed" in two.stdout
    records = [Record.read(f"runs/{name}") for name in ("one", "two")]
    assert records[1].losses == pytest.approx(records[0].losses, rel=1e-9)
    assert [one.values for one in records[1].evaluations] == [
        pytest.approx(one.values, rel=1e-9) for one in records[0].evaluations
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num", ["1", "2"])
def test_a_loader_of_a_custom_loop_gives_every_sample_once(num: str) -> None:
    Path("loop.py").write_text(LOOP)
    done = command("run", "--nproc-per-node", num, "loop.py")
    assert done.returncode == 0, done.stderr
    every = json.loads(done.stdout.splitlines()[-1])
    assert len(every) == int(num)
    assert sorted(one for ids in every for batch in ids for one in batch) == list(range(23))
    assert [sum(map(len, batches)) for batches in zip(*every, strict=True)] == [6, 6, 6, 5]
