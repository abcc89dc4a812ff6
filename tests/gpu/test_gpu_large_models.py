"""On a GPU: activation checkpointing, fsdp's own bf16 in a world of one, building unit by unit, and its checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from evenstep.tasks.networks import GPT
from evenstep.training.activation_checkpointing import checkpoint_activations

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
from evenstep.internals import fsdp_groups
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
