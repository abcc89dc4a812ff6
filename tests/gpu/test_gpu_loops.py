"""Custom loops and adopted trainers on a GPU."""

from __future__ import annotations

import json
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


def drawing_loop(folder: str, num_steps: int) -> list[float]:
    """A loop that draws its batches on the GPU, and more numbers between a step and its checkpoint."""
    team = evenstep.join("single", devices=("cuda:0",), precision="fp64")
    model = team.wrap(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    run = evenstep.Run(team, model, optimizer, folder=folder)
    run.load()
    while run.step < num_steps:
        rows = torch.randn(9, 6, device=team.world.device)
        mean = team.backward(lambda model, batch: (model(batch) - batch[:, :2]).square().mean(), model, rows)
        team.step(optimizer)
        run.log(mean)
        torch.randn(3, device=team.world.device)
        run.save()
    run.finish()
    return Record.read(folder).losses


def test_a_loop_that_draws_on_the_gpu_resumes_with_the_numbers_that_come_next() -> None:
    whole = drawing_loop("runs/whole", 6)
    assert drawing_loop("runs/halves", 3) == pytest.approx(whole[:3], rel=1e-12)
    state = json.loads(Path("runs/halves/checkpoints/latest/state.json").read_text())
    assert [len(one["cuda"]) for one in state["generators"]] == [1]
    assert drawing_loop("runs/halves", 6) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("name", ["trainer_task", "lightning_task"])
def test_the_first_steps_of_an_adopted_task_are_those_of_its_original(name: str) -> None:
    pytest.importorskip("transformers" if name == "trainer_task" else "lightning")
    file = Path(__file__).parents[1] / "process" / f"{name}.py"
    command = [sys.executable, "-m", "evenstep", "adopt", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
