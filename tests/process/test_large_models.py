"""A model that no rank could hold is built, trained, saved and resumed by fsdp; its values are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep.distributed.world import World
from evenstep.training import file_backed_init
from evenstep.training.file_backed_init import build
from tests.fleet import newest_weights

MB = 10**6
WIDTH, BLOCKS = 1024, 36
STATE_BYTES = 16 * BLOCKS * WIDTH**2
"""Weights, gradients and AdamW's averages: about 600 MB, of which the weights are a quarter."""
ALLOWED = STATE_BYTES // 3
TASK = f"""
import os, resource
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task


def network():
    blocks = [nn.Linear({WIDTH}, {WIDTH}) for _ in range({BLOCKS})]
    return nn.Sequential(*blocks[:-1], nn.Linear({WIDTH}, 4))


def task(limit: int = 0) -> Task:
    if limit and "RANK" in os.environ:
        used = int(open("/proc/self/statm").read().split()[5]) * 4096
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit, resource.RLIM_INFINITY))
    generator = torch.Generator().manual_seed(0)
    return Task(
        model=network,
        train=(torch.randn(64, {WIDTH}, generator=generator), torch.randint(4, (64,), generator=generator)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch=16,
    )
"""


def evenstep(*words: str) -> subprocess.CompletedProcess[str]:
    # Without it, glibc keeps gaps between tensors, as docs/large-models.md says.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "524288"}
    command = [sys.executable, "-m", "evenstep", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_model_of_three_times_the_memory_of_a_rank(tmp_path: Path) -> None:
    """Not even the weights would fit beside what a rank of one device needs; on four ranks of fsdp all of it does."""
    Path("large.py").write_text(TASK)
    limit = ALLOWED + 60 * MB  # stacks and buffers of the threads that torch and gloo start
    common = ["--batch", "16", "--threads", "1", "--out", str(tmp_path), "--seed", "3"]
    fsdp = ["--strategy", "fsdp", "--devices", "cpu,cpu,cpu,cpu", *common]
    first = evenstep("train", "large.py", f"limit={limit}", *fsdp, "--steps", "3", "--name", "first", "--json")
    assert first.returncode == 0, first.stderr
    more = ["--resume", str(tmp_path / "first"), "--steps", "5", "--name", "second", "--json"]
    second = evenstep("train", "large.py", f"limit={limit}", *fsdp, *more)
    assert second.returncode == 0, second.stderr
    single = evenstep("train", "large.py", *common, "--steps", "5", "--name", "single", "--json")
    assert single.returncode == 0, single.stderr
    ours, theirs = (newest_weights(tmp_path / name) for name in ("second", "single"))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-4
    failed = evenstep("train", "large.py", f"limit={limit}", "--strategy", "ddp", "--devices", "cpu,cpu", *common)
    assert failed.returncode != 0, "this limit would be enough for a whole model"
    forecast = evenstep(
        "fit", "large.py", "--strategy", "fsdp", "--devices", "cpu,cpu,cpu,cpu", "--batch", "16", "--json"
    )
    (row,) = [one for one in json.loads(forecast.stdout)["rows"] if one["strategy"] == "fsdp"]
    expected = sum(row["kinds"].values())
    peak = max(json.loads(first.stdout)["peak_bytes"].values())
    assert peak == pytest.approx(expected, rel=0.15)


class Net(nn.Module):
    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        self.register_buffer("mask", torch.ones(256, 256).tril())
        nn.init.orthogonal_(self.layers[0].weight)
        self.scale = nn.Parameter(torch.rand(256, 256) * 0.1)
        if keeps:
            self.table = torch.arange(65536.0).view(256, 256)


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_backed_init, "LARGE", 2**16)


def world(rank: int) -> World:
    return World(rank=rank, size=2, devices=(torch.device("cpu"),))


def test_values_are_those_of_a_model_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = Net().state_dict()
    torch.manual_seed(1)
    module = build(Net, world(0), tmp_path)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in expected.items())
    addresses = {one.untyped_storage().data_ptr() for one in module.state_dict().values() if one.ndim > 1}
    mapped = Path("/proc/self/maps").read_text()
    assert all(
        any(line.startswith(f"{address:x}-") and "building-" in line for line in mapped.splitlines())
        for address in addresses
    )
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_map_one_file_and_draw_as_many_numbers(tmp_path: Path) -> None:
    torch.manual_seed(1)
    Net()
    expected = torch.rand(3)
    torch.manual_seed(1)
    module = build(Net, world(1), tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert module.layers[0].weight.shape == (256, 256)
    assert list(tmp_path.iterdir()) == []


def test_a_large_tensor_beside_parameters_and_buffers_keeps_its_values(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = build(lambda: Net(keeps=True), world(1), tmp_path)
    assert torch.equal(module.table, torch.arange(65536.0).view(256, 256))


class Computed(Net):
    def __init__(self, compute: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.found = compute(self.layers[1].weight.detach())


@pytest.mark.parametrize("compute", [lambda weight: float(weight.std()), lambda weight: weight.mean(0)])
def test_what_is_computed_from_large_tensors_is_the_same_on_all_ranks(
    compute: Callable[[torch.Tensor], object], tmp_path: Path
) -> None:
    found = []
    for rank in (0, 1):
        torch.manual_seed(1)
        found.append(build(lambda: Computed(compute), world(rank), tmp_path).found)
    assert torch.equal(*map(torch.as_tensor, found))


def test_a_model_of_parameters_and_buffers_is_built_once(tmp_path: Path) -> None:
    made: list[object] = []
    build(lambda: Computed(lambda weight: made.append(weight.shape)), world(1), tmp_path)
    assert made == [(256, 256)]


def test_memory_of_the_process_does_not_grow_with_the_model(tmp_path: Path) -> None:
    script = f"""
import resource, torch
from pathlib import Path
from torch import nn
from evenstep.training.file_backed_init import FileBacked
torch.ones(10) @ torch.ones(10)
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
before = peak()
with FileBacked(Path({str(tmp_path)!r})):
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24)))
print(peak() - before, sum(one.nbytes for one in model.parameters()))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    grown, whole = map(int, ended.stdout.split())
    assert whole > 400 * MB
    assert grown < whole / 3
