"""Custom loops and adopted trainers on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from evenstep.record import Record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
]
x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def losses_of(strategy: str, devices: tuple[str, ...]) -> tuple[list[float], torch.Tensor]:
    """A loop that brings tensors of its own from the CPU, and calls the model between steps."""
    team = evenstep.join(strategy, devices=devices, precision="fp64")
    torch.manual_seed(0)
    model = team.wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run = evenstep.Run(team, model, optimizer, folder=f"runs/{strategy}")
    outputs = []
    for step in range(10):
        rows = x[step : step + 5 + step % 3]
        run.log(team.backward(lambda model, batch: (model(batch) - batch[:, :2]).square().mean(), model, rows))
        team.step(optimizer)
        outputs.append(model(x[:3].to(team.world.device, torch.float64)).cpu())
    run.save(seen=outputs[-1])
    run.finish()
    return Record.read(f"runs/{strategy}").losses, torch.stack(outputs)


def test_a_loop_with_tensors_of_its_own_is_the_same_on_two_replicas() -> None:
    losses, outputs = losses_of("single", ("cuda:0",))
    both, seen = losses_of("dp", ("cuda:0", "cuda:0"))
    assert both == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(seen, outputs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["trainer_task", "lightning_task"])
def test_the_first_steps_of_an_adopted_task_are_those_of_its_original(name: str) -> None:
    pytest.importorskip("transformers" if name == "trainer_task" else "lightning")
    file = Path(__file__).parents[1] / "process" / f"{name}.py"
    command = [sys.executable, "-m", "evenstep", "adopt", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
