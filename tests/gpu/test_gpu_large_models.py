"""On a GPU: activation checkpointing; fsdp in a world of one: its own bf16, CPU offload, building, checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from evenstep.tasks.networks import GPT
from evenstep.training.activation_checkpointing import checkpoint_activations
from tests.fleet import furthest, newest_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def peak_of_step(recomputes: bool) -> tuple[int, float]:
    torch.manual_seed(0)
    model = GPT(256, 256, 8, 8, 512).cuda()
    if recomputes:
        checkpoint_activations(model)
    tokens = torch.randint(0, 256, (16, 257), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return torch.cuda.max_memory_allocated(), float(loss.detach())


def test_activation_checkpointing_takes_less_memory_and_computes_the_same() -> None:
    (without, loss), (with_, other) = peak_of_step(False), peak_of_step(True)
    assert with_ < 0.7 * without
    assert other == pytest.approx(loss, rel=1e-6)


SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
import evenstep
from evenstep.private_apis import fsdp_groups
from evenstep.strategies.fsdp import FSDP
from evenstep.tasks.networks import GPT
FSDP.wraps_alone = sys.argv[2] == "fsdp"
team = evenstep.join(sys.argv[2], devices=["cuda:0"], precision="bf16")
torch.manual_seed(0)
model = team.wrap(GPT(64, 64, 4, 4, 128))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 64, (128, 65), generator=torch.Generator().manual_seed(0))
seen = {}
def loss(model, batch):
    scores = model(batch[0])
    found = F.cross_entropy(scores.flatten(0, 1), batch[1].flatten())
    seen.update(output=str(scores.dtype), loss=str(found.dtype))
    return found
run = evenstep.Run(team, model, optimizer)
losses = []
for batch in team.loader((tokens[:, :-1], tokens[:, 1:]), batch=16):
    losses.append(float(team.backward(loss, model, batch)))
    team.step(optimizer)
path = run.save(sys.argv[1])
gathered = []
if FSDP.wraps_alone:
    groups = [group for _, _, group in fsdp_groups(model.replicas[0])]
    gathered = sorted({str(one.param_dtype) for group in groups for one in group.fsdp_params})
    whole = {name: value.full_tensor().cpu() for name, value in model.module.named_parameters()}
    from safetensors.torch import load_file
    stored = load_file(path / "weights.safetensors")
    assert all(torch.equal(stored[name], whole[name]) for name in whole)
print(json.dumps({**seen, "losses": losses, "gathered": gathered}))
"""


def trained(folder: Path, strategy: str) -> dict[str, list[float]]:
    command = [sys.executable, "-c", SCRIPT, str(folder), strategy]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[float]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_fsdp_gathers_in_bfloat16_and_learns_what_single_learns(tmp_path: Path) -> None:
    single, fsdp = (trained(tmp_path / strategy, strategy) for strategy in ("single", "fsdp"))
    assert fsdp["gathered"] == ["torch.bfloat16"]
    assert (fsdp["output"], fsdp["loss"]) == (single["output"], single["loss"]) == ("torch.bfloat16", "torch.float32")
    assert fsdp["losses"] == pytest.approx(single["losses"], rel=0.02)


OFFLOADED = """
import json, sys
import torch
from torch.nn import functional as F
import evenstep
from evenstep.checkpoint.state_dict import whole
from evenstep.strategies.fsdp import FSDP
from evenstep.tasks.networks import GPT
from evenstep.training.fused_optimizer import fuse
kind, precision, folder, start = sys.argv[1:]
FSDP.wraps_alone = kind == "fsdp"
strategy = "single" if kind == "single" else "fsdp"
team = evenstep.join(strategy, devices=["cuda:0"], precision=precision, cpu_offload=kind == "offload")
torch.manual_seed(0)
model = team.wrap(GPT(64, 32, 8, 8, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
fuse(optimizer, model.module)
tokens = torch.randint(0, 64, (30, 33), generator=torch.Generator().manual_seed(0))
loader = team.loader((tokens[:, :-1], tokens[:, 1:]), batch=4, accumulate=2)
run = evenstep.Run(team, model, optimizer, loader)
if start:
    run.load(start)
def loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
losses, norms = [], []
for number, batch in enumerate(loader):
    if number == 2:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    losses.append(float(team.backward(loss, model, batch)))
    norms.append(float(team.step(optimizer, clip=0.5).grad_norm))
torch.cuda.synchronize()
peak = torch.cuda.max_memory_allocated()
evaluated = team.evaluate(lambda model, batch: {"loss": loss(model, batch)}, model, loader)
run.save(folder)
tensors = {name: whole(value, keep=True) for name, value in model.module.named_parameters()}
state = [one for kept in optimizer.state.values() for one in kept.values() if torch.is_tensor(one)]
print(json.dumps({
    "losses": losses, "norms": norms, "peak": peak, "evaluated": evaluated["loss"],
    "sums": {name: [float(value.double().sum()), float(value.double().norm())] for name, value in tensors.items()},
    "weights_on": sorted({one.device.type for one in model.parameters()}),
    "state_on": sorted({one.device.type for one in state if one.ndim}),
}))
"""


def offloaded(kind: str, precision: str, folder: Path, start: str = "") -> dict[str, Any]:
    command = [sys.executable, "-c", OFFLOADED, kind, precision, str(folder), start]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def check_losses(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    assert len(one["losses"]) == 8
    for name in ("losses", "norms", "evaluated"):
        assert other[name] == pytest.approx(one[name], rel=tolerance), name


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """In float64."""
    check_losses(one, other, 1e-9)
    assert other["sums"].keys() == one["sums"].keys()
    for name, (total, norm) in one["sums"].items():
        # A sum of many numbers may be near zero.
        assert other["sums"][name] == [pytest.approx(total, abs=1e-6), pytest.approx(norm, rel=1e-9)], name


def test_shards_in_host_memory_learn_the_same_in_less_memory(tmp_path: Path) -> None:
    """With micro-batches, clipping and a short last batch; and its checkpoint loads anywhere."""
    single, fsdp, offload = (offloaded(kind, "fp64", tmp_path / kind) for kind in ("single", "fsdp", "offload"))
    check_same(single, fsdp)
    check_same(single, offload)
    assert (fsdp["weights_on"], fsdp["state_on"]) == (["cuda"], ["cuda"])
    assert (offload["weights_on"], offload["state_on"]) == (["cpu"], ["cpu"])
    # Gradients of the first micro-batch stay whole on the GPU.
    assert offload["peak"] < 0.6 * fsdp["peak"]
    starts = [str(checkpoint_in(tmp_path / kind)) for kind in ("single", "offload")]
    again = offloaded("offload", "fp64", tmp_path / "again", starts[0])
    other = offloaded("single", "fp64", tmp_path / "other", starts[1])
    check_same(other, again)
    assert again["weights_on"] == again["state_on"] == ["cpu"]


def checkpoint_in(folder: Path) -> Path:
    (found,) = {one.parent for one in folder.rglob("weights.safetensors") if "latest" not in one.parts}
    return found


def test_shards_in_host_memory_in_bfloat16(tmp_path: Path) -> None:
    fsdp, offload = (offloaded(kind, "bf16", tmp_path / kind) for kind in ("fsdp", "offload"))
    check_losses(fsdp, offload, 0.02)
    assert offload["peak"] < 0.6 * fsdp["peak"]


TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)),
        train=(x[:192], y[:192]), valid=(x[192:], y[192:]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), batch=20, ema=0.9,
    )
"""


def test_a_run_with_cpu_offload_goes_on_without(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(TASK)

    def train(*arguments: str) -> str:
        command = [sys.executable, "-m", "evenstep", "train", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
        return ended.stderr + ended.stdout

    how = ("my_task.py", "--precision", "fp64", "--clip", "0.5", "--accumulate", "2", "--devices", "cuda:0")
    train(*how, "--strategy", "single", "--steps", "24", "--name", "whole")
    train(*how, "--strategy", "fsdp", "--cpu-offload", "--steps", "12", "--name", "first")
    train("--resume", "runs/first", "--steps", "18", "--name", "second")
    said = train("--resume", "runs/second", "--strategy", "single", "--steps", "24", "--name", "third")
    assert "--cpu-offload needs shards on GPUs, and this run has none; ignoring it" in said
    ours, theirs = (newest_weights(tmp_path / "runs" / name) for name in ("third", "whole"))
    assert furthest(ours, theirs) < 1e-9
