"""The parts of a captured step: the losses that it writes, slices of an update, a capture that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep import Task
from evenstep.training.cuda_graphs.graph import SLOTS, LossRing
from tests.pure.test_fused_slices import KINDS, descend, made

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("shape", [(), (2,), (2, 2), (3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_replay_writes_its_slot(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    device = torch.device("cuda:0")
    ring = LossRing(torch.cuda.Stream(device), 7)
    count = torch.zeros(shape, dtype=dtype, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        # Memory that the graph uses before, and that must not be where earlier values are.
        torch.ones(1000, device=device).mul_(3)
        count += 1
        ring.record(count)
        torch.ones(1000, device=device).mul_(5)
        ring.join()
    found = []
    for number in range(3 * SLOTS + 1):
        graph.replay()
        place = ring.next()
        assert place == number % SLOTS
        if number % 3 == 2:
            torch.cuda.synchronize()
            found.append((number, ring.read(place), ring.read((place - 2) % SLOTS)))
    for number, now, before in found:
        assert now == torch.full(shape, number + 1.0).tolist()
        assert before == torch.full(shape, number - 1.0).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_slices_end_where_whole_tensors_end_on_a_gpu(kind: str) -> None:
    ends = []
    for is_sliced in (True, False):
        weights = [nn.Parameter(weight.detach().cuda()) for weight in made()]
        ends.append(descend(KINDS[kind](weights), weights, is_sliced))
    assert all(map(torch.equal, *ends))


def test_memory_is_given_back_after_a_recording_that_broke_off(capsys: pytest.CaptureFixture[str]) -> None:
    def reads(model: nn.Module, batch: Any) -> torch.Tensor:
        value = F.cross_entropy(model(batch[0]), batch[1])
        return value if value.item() > 0 else -value

    # From the host, so that batches are copied on a stream of their own: those are what stayed behind.
    train = (torch.randn(6400, 4096), torch.randint(0, 5, (6400,)))
    task = Task(
        model=lambda: nn.Linear(4096, 5),
        train=train,
        loss=reads,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=64,
    )
    evenstep.train(task, epochs=2)
    assert "it cannot be captured" in capsys.readouterr().err
    torch.cuda.synchronize()
    torch.empty(1, device="cuda:0")  # an allocation looks at what has become free
    found = torch.cuda.memory_stats()
    batch_bytes = 64 * 4096 * 4
    assert found["active_bytes.all.current"] - found["allocated_bytes.all.current"] < 20 * batch_bytes
