"""With --checkpoint-activations a training has the same losses and weights as without, by every strategy."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep.errors import PlanError, TaskError
from evenstep.fit.fake_tensor_pass import step_memory
from evenstep.fit.memory_model import STEP
from evenstep.plan import Plan
from evenstep.tasks.networks import GPT
from evenstep.training.activation_checkpointing import RecomputedForward, checkpoint_activations
from tests.fleet import furthest, result, run_jobs
from tests.marks import first_is_quick, num_steps
from tests.small_tasks import mlp, small_task

WHOLE = {"batch": 24, "steps": 4}
"""BatchNorm has no short batch."""
CASES = [
    ("fsdp", "gpt/adamw/pair/dropout", {"accumulate": 3}),
    ("single", "gpt/adamw/pair/dropout", {}),
    ("ddp", "gpt/sgd/mean/dropout", {"accumulate": 3}),
    ("ddp", "norm/sgd/mean", WHOLE),
    ("fsdp", "norm/adamw/mean", {**WHOLE, "accumulate": 3}),
    ("single", "spectral/sgd/mean", {"accumulate": 3}),
    ("fsdp", "spectral/sgd/mean", {}),
    ("fsdp", "gpt/adamw/pair/dropout", {"virtual_replicas": 2}),
    ("ddp", "norm/adamw/mean", {**WHOLE, "virtual_replicas": 4}),
    ("ddp", "norm/adamw/mean", {**WHOLE, "sync_batchnorm": True}),
    ("single", "gpt/adamw/pair/dropout", {"precision": "bf16"}),
    ("fsdp", "gpt/adamw/pair/dropout", {"precision": "bf16", "accumulate": 3}),
]
TOLERANCE = 1e-9
STEPS = num_steps(6, 20)


def plan(strategy: str, recomputes: bool, **more: object) -> Plan:
    fields = {"precision": "fp64", "batch": 10, "steps": STEPS, "clip": 1.0, "threads": 1} | more
    num = 1 if strategy == "single" else 2
    return Plan(strategy=strategy, devices=("cpu",) * num, checkpoint_activations=recomputes, **fields)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("checkpointed")
    of_this = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = [one.params["number"] for one in of_this if one is not None and "number" in one.params]
    for size in (1, 2):
        jobs = [
            (f"{number}-{recomputes}", plan(strategy, recomputes, **more), key)
            for number, (strategy, key, more) in enumerate(CASES)
            for recomputes in (False, True)
            if number in wanted and (strategy == "single") == (size == 1)
        ]
        if jobs:
            run_jobs(folder, size, jobs)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", first_is_quick(range(len(CASES)), 2))
def test_learns_the_same_as_without(trained: Path, number: int) -> None:
    without, with_ = (result(trained, f"{number}-{recomputes}") for recomputes in (False, True))
    assert len(without.record.losses) == CASES[number][2].get("steps", STEPS)
    assert with_.record.losses == pytest.approx(without.record.losses, rel=TOLERANCE)
    assert furthest(with_.weights, without.weights) < TOLERANCE


def test_activations_are_not_kept() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)))
    blocks = nn.Sequential(*(Block(one) for one in blocks))
    kept = [_kept_bytes(blocks)]
    checkpoint_activations(blocks)
    assert _kept_bytes(blocks) < kept[0] / 2


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def _kept_bytes(model: nn.Module) -> int:
    """Of what autograd saves for backward, parameters left out."""
    known = {weight.data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(32, 64, requires_grad=True)).sum().backward()
    return sum(kept.values())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.counts = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
        return self.norm(self.linear(x)).tanh()


def normed() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(Normed(), Normed())
    recomputed = copy.deepcopy(model)
    checkpoint_activations(recomputed)
    return model, recomputed


def test_buffers_that_change_later_do_not_change_twice() -> None:
    """BatchNorm that is frozen at first; and a buffer that the first steps leave alone."""
    pair = normed()
    for model in pair:
        model[0].norm.eval()
        model[0].counts = model[1].counts = False
        for step in range(4):
            model(torch.arange(32.0).view(8, 4)).sum().backward()
            model[0].norm.train(step >= 1)
            model[1].counts = step >= 1
    plain, recomputed = pair
    assert plain[0].norm.num_batches_tracked == plain[1].calls == 2
    for name, value in plain.state_dict().items():
        assert torch.equal(value, recomputed.state_dict()[name]), name


def test_two_backwards_through_one_forward() -> None:
    pair = normed()
    for model in pair:
        loss = model(torch.arange(32.0).view(8, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(*(model.parameters() for model in pair), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert pair[1][0].norm.num_batches_tracked == 1


def test_a_copy_computes_with_its_own_parameters() -> None:
    model = mlp()
    checkpoint_activations(model)
    other = copy.deepcopy(model)
    assert isinstance(other[0].forward, RecomputedForward)
    other(torch.ones(1, 20)).sum().backward()
    assert other[0].weight.grad is not None
    assert model[0].weight.grad is None


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(TaskError, match="found no blocks in the model"):
        checkpoint_activations(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compile": True}, "leave one out"),
        ({"strategy": "dp", "devices": ("cpu", "cpu")}, "could not repeat what dropout drew; use --strategy ddp"),
        ({"statistics": 2}, "leave one out"),
    ],
)
def test_what_it_cannot_be_combined_with(given: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Plan(batch=8, steps=1, checkpoint_activations=True, **given)


def test_a_forecast_of_memory_knows_the_flag() -> None:
    network = partial(GPT, vocabulary=11, context=8, layers=4, heads=2, width=32)
    task = replace(small_task("gpt/sgd/mean"), model=network)
    highest = []
    for recomputes in (False, True):
        memory = step_memory(plan("single", recomputes, precision="fp32"), task, 64, 0.0)
        highest.append(max(moment.at(64)["activations"] for moment in memory.phases[STEP]))
    assert highest[1] < highest[0] / 2
