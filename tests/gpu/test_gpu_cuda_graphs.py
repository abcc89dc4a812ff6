"""Steps that are replayed as CUDA graphs: the same losses and weights as eager steps, or eager steps with a reason."""

from __future__ import annotations

import gc
import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep import Task, samplers
from evenstep.errors import NonFiniteLoss
from evenstep.record import Record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM = 440
BATCH = 40


class Net(nn.Module):
    """A bit of everything: convolution, batch statistics, dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        # No bias: batch statistics take it away again, and Adam makes much of the rounding that is left.
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(8 * 36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.dropout(F.relu(self.norm(self.conv(x))).flatten(1)))


def task(**changes: Any) -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM, 3, 8, 8, generator=generator)
    y = torch.randint(0, 5, (NUM,), generator=generator)
    usual = Task(
        model=Net,
        train=(x, y),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=BATCH,
    )
    return replace(usual, **changes)


def pair(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    counted = (batch[1] > 0).float()
    return (losses * counted).sum(), counted.sum()


def cosine(optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)


def epochwise(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    """After the first, no loss is better by so much: the rate falls at every evaluation."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.9, patience=0, threshold=9.0, threshold_mode="abs"
    )


VALID = (torch.randn(50, 3, 8, 8), torch.randint(0, 5, (50,)))

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "ragged": ({}, {"batch": 48}),
    "schedule and clip": ({"scheduler": cosine}, {"clip": 0.1}),
    "schedule per epoch": ({"scheduler": epochwise, "schedule_every": "epoch"}, {}),
    "plateau within epochs": ({"scheduler": plateau, "valid": VALID}, {"evaluate_every": 3}),
    "accumulate": ({}, {"accumulate": 2}),
    "pair": ({"loss": pair}, {"accumulate": 2}),
    "sgd": ({"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=True)}, {}),
    "not fused": ({"optimizer": lambda weights: torch.optim.RMSprop(weights, lr=1e-3)}, {}),
    "bf16": ({}, {"precision": "bf16"}),
    "fp16": ({"scheduler": cosine}, {"precision": "fp16"}),
    "two groups": (
        {"optimizer": lambda weights: torch.optim.Adam([{"params": [w], "lr": 1e-3} for w in weights])},
        {},
    ),
}


def weights(record: Record) -> dict[str, torch.Tensor]:
    assert record.summary is not None
    return load_file(Path(str(record.summary.checkpoint)) / "weights.safetensors")


def run_case(case: str, capsys: pytest.CaptureFixture[str], **choices: Any) -> tuple[Record, str]:
    changes, more = CASES[case]
    if choices["strategy"] == "dp":
        # Dropout under dp is not repeatable where a GPU is listed twice: its replicas share a generator.
        changes = {**changes, "model": lambda: Net(0.0)}
    record = evenstep.train(task(**changes), epochs=4, **{**more, **choices})
    return record, capsys.readouterr().err


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("strategy", "devices"), [("single", ("cuda:0",)), ("dp", ("cuda:0", "cuda:0"))])
def test_replayed_steps_learn_what_plain_ones_learn(
    name: str,
    strategy: str,
    devices: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, _ = run_case(name, capsys, strategy=strategy, devices=devices, fast="off", name="plain")
    fast, said = run_case(name, capsys, strategy=strategy, devices=devices, fast="auto", name="fast")
    assert "replayed as a CUDA graph" in said
    whole = strategy == "single" and name not in ("not fused", "fp16")
    assert ("the whole step is" in said) == whole
    rough = name in ("bf16", "fp16")
    assert [step.step for step in fast.steps] == [step.step for step in plain.steps]
    assert [step.lr for step in fast.steps] == [step.lr for step in plain.steps]
    assert [step.count for step in fast.steps] == [step.count for step in plain.steps]
    for one, other in zip(plain.steps, fast.steps, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=0.2 if rough else 2e-3)
    if not rough:
        for key, value in weights(plain).items():
            torch.testing.assert_close(weights(fast)[key], value, rtol=1e-3, atol=1e-4)


def test_ddp_over_nccl_is_replayed_too() -> None:
    """One process needs no DDP; here it wraps anyway, because this machine has no second GPU."""
    Path("my_task.py").write_text(
        "from evenstep.strategies.ddp import DDP\nfrom tests.gpu.test_gpu_cuda_graphs import task as made\n\n"
        "DDP.wraps_alone = True\n\n\ndef task():\n    return made()\n"
    )
    said = {}
    for fast in ("off", "auto"):
        command = [sys.executable, "-m", "evenstep", "train", "my_task.py", "--strategy", "ddp", "--devices", "cuda:0"]
        more = ["--epochs", "4", "--fast", fast, "--name", fast]
        ended = subprocess.run([*command, *more], capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stderr[-3000:]
        said[fast] = ended.stderr
    assert "the whole step is replayed as a CUDA graph" in said["auto"]
    plain, fast_ = Record.read("runs/off"), Record.read("runs/auto")
    for one, other in zip(plain.steps, fast_.steps, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=2e-3)


class WithSpare(Net):
    """A layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.spare = nn.Linear(4, 4)


def test_a_parameter_that_no_step_uses_is_left_alone_by_replays(capsys: pytest.CaptureFixture[str]) -> None:
    decayed = {"model": WithSpare, "optimizer": lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.5)}
    plain = evenstep.train(task(**decayed), epochs=4, fast="off", name="plain")
    capsys.readouterr()
    fast = evenstep.train(task(**decayed), epochs=4, name="fast")
    assert "replayed as a CUDA graph" in capsys.readouterr().err
    assert torch.equal(weights(fast)["spare.weight"], weights(plain)["spare.weight"])


@pytest.mark.parametrize(("strategy", "devices"), [("single", ("cuda:0",)), ("dp", ("cuda:0", "cuda:0"))])
def test_unused_parameters_of_the_first_step_are_named_once_where_steps_are_replayed(
    strategy: str, devices: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    evenstep.train(task(model=WithSpare), strategy=strategy, devices=devices, epochs=4, name="fast")
    said = capsys.readouterr().err
    assert "replayed as a CUDA graph" in said
    assert said.count("no gradient reaches spare.weight, spare.bias (2 of 7 parameters)") == 1


def test_ddp_names_unused_parameters_once_too() -> None:
    """As above: one process needs no DDP, and is wrapped anyway."""
    Path("my_task.py").write_text(
        "from evenstep.strategies.ddp import DDP\n"
        "from tests.gpu.test_gpu_cuda_graphs import WithSpare, task as made\n\n"
        "DDP.wraps_alone = True\n\n\ndef task():\n    return made(model=WithSpare)\n"
    )
    words = ["--strategy", "ddp", "--devices", "cuda:0", "--epochs", "4", "--name", "fast"]
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stderr.count("no gradient reaches spare.weight, spare.bias (2 of 7 parameters)") == 1
    record = Record.read("runs/fast")
    assert record.losses[-1] < record.losses[0]


def test_several_optimizers_step_eagerly(capsys: pytest.CaptureFixture[str]) -> None:
    """A teacher, and two students that are trained in turn."""

    def loss_of(name: str) -> Any:
        return lambda models, batch: F.mse_loss(models[name](batch[0]), models.teacher(batch[0]))

    several: dict[str, Any] = {
        "model": lambda: {"one": Net(0.0), "other": Net(0.0), "teacher": Net(0.0)},
        "loss": {name: loss_of(name) for name in ("one", "other")},
        "optimizer": dict.fromkeys(("one", "other"), lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)),
        "scheduler": {"other": epochwise},
        "schedule_every": "epoch",
    }
    record = evenstep.train(task(**several), epochs=2, name="several", clip=float("inf"))
    assert "fast: steps stay eager: the task has several optimizers" in capsys.readouterr().err
    assert record.steps[-1].logged["loss/other"] < record.steps[0].logged["loss/other"]
    assert [step.logged["lr/other"] for step in record.steps] == [1e-3] * 11 + [5e-4] * 11
    for step in record.steps:
        norms = [step.logged[f"grad_norm/{one}"] for one in several["loss"]]
        assert step.grad_norm == pytest.approx(math.hypot(*norms))


def test_a_loss_that_is_no_number_stops_at_its_step_with_the_weights_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = task()
    x, y = made.train
    x[123] = float("nan")
    with pytest.raises(NonFiniteLoss) as plain:
        evenstep.train(task(train=(x, y)), epochs=4, fast="off", name="plain", checkpoint_every=1, seed=3)
    with pytest.raises(NonFiniteLoss) as fast:
        evenstep.train(task(train=(x, y)), epochs=4, fast="auto", name="fast", seed=3)
    assert str(fast.value).splitlines()[0] == str(plain.value).splitlines()[0]


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ("reads", "it cannot be captured"),
        ("counts", "changes from step to step"),
        ("draws", "Python's random numbers changes from step to step"),
        ("draws_by_torch", "it draws random numbers on the host"),
        ("alternates", "the parameters that have a gradient change from step to step"),
    ],
)
def test_what_a_graph_cannot_hold_is_taken_eagerly(loss: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    import random

    calls = [0.0]
    count = 0
    turns = itertools.cycle([True, False])

    def reads(model: nn.Module, batch: Any) -> torch.Tensor:
        value = F.cross_entropy(model(batch[0]), batch[1])
        return value if value.item() > 0 else -value

    def counts(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return F.cross_entropy(model(batch[0]), batch[1]) * (1 + 1 / count)

    def draws(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] = random.random()
        return F.cross_entropy(model(batch[0]), batch[1]) * calls[0]

    def draws_by_torch(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * float(torch.rand(()))

    def alternates(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = F.relu(model.norm(model.conv(batch[0]))).flatten(1)
        return F.cross_entropy(model.out(hidden if next(turns) else hidden.detach()), batch[1])

    functions = (reads, counts, draws, draws_by_torch, alternates)
    (chosen,) = [function for function in functions if function.__name__ == loss]
    fast = evenstep.train(task(loss=chosen), epochs=2, name="fast")
    said = capsys.readouterr().err
    assert "steps stay eager" in said
    assert why in said
    random.seed(0)
    assert len(fast.steps) == 2 * NUM // BATCH


def test_a_run_that_is_resumed_ends_where_an_undisturbed_one_ends() -> None:
    whole = evenstep.train(task(model=lambda: Net(0.0)), epochs=4, name="whole")
    evenstep.train(task(model=lambda: Net(0.0)), epochs=2, name="half")
    rest = evenstep.train(task(model=lambda: Net(0.0)), epochs=4, name="rest", resume="runs/half")
    for key, value in weights(whole).items():
        torch.testing.assert_close(weights(rest)[key], value, rtol=1e-3, atol=1e-4)


class Littering(Net):
    """During a capture, it leaves a CUDA graph of before as garbage, and lists, which make Python collect garbage."""

    def __init__(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        super().__init__()
        self.graphs = graphs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and self.graphs:
            cycle: list[Any] = [self.graphs.pop()]
            cycle.append(cycle)
            del cycle
            self.lists = [[number] for number in range(100)]
        return super().forward(x)


def test_a_capture_does_not_free_the_graph_of_an_earlier_run(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    weight = torch.ones(4, device="cuda")
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        weight.mul_(2)
    graphs = [graph]
    del graph
    request.addfinalizer(partial(gc.set_threshold, *gc.get_threshold()))
    gc.set_threshold(20)
    evenstep.train(task(model=lambda: Littering(graphs)), epochs=4)
    assert not graphs
    assert "replayed as a CUDA graph" in capsys.readouterr().err


LENGTHS = (8, 12, 16, 20, 24, 28)


def of_lengths(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded to the next of six lengths."""
    longest = max(len(tokens) for tokens, _ in rows)
    length = next(one for one in LENGTHS if one >= longest)
    padded = [F.pad(tokens, (0, length - len(tokens))) for tokens, _ in rows]
    return torch.stack(padded), torch.stack([label for _, label in rows])


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(50, 32), nn.Linear(32, 5)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden.mean(1))


def text(**changes: Any) -> Task:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTHS[0] - 3, LENGTHS[-1] + 1, (NUM,), generator=generator).tolist()
    rows = [
        (torch.randint(1, 50, (length,), generator=generator), torch.randint(0, 5, (), generator=generator))
        for length in lengths
    ]
    usual = {"model": Reader, "train": rows, "collate": of_lengths, "batch": 8}
    return task(**{**usual, "sampler": samplers.ByLength(lengths), **changes})


def test_every_length_that_recurs_gets_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    choices: dict[str, Any] = {"epochs": 8, "workers": 0, "batch": 8}
    plain = evenstep.train(text(), fast="off", name="plain", **choices)
    capsys.readouterr()
    fast = evenstep.train(text(), name="fast", **choices)
    said = capsys.readouterr().err
    assert "replayed as a CUDA graph" in said
    assert "captured another batch shape" in said or "shapes" in said
    for one, other in zip(plain.steps, fast.steps, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=2e-3)
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(fast)[key], value, rtol=1e-3, atol=1e-4)


def test_a_spoilt_sample_among_graphs_of_several_lengths_stops_at_its_step() -> None:
    def spoiling(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1].clamp(max=4)) / (batch[1] < 5).float().prod()

    rows = list(text().train)
    rows[200] = (rows[200][0], torch.tensor(7))
    messages = []
    for fast in ("off", "auto"):
        with pytest.raises(NonFiniteLoss) as error:
            evenstep.train(text(train=rows, loss=spoiling), fast=fast, name=fast, epochs=8, workers=0, seed=5)
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1]


def test_replayed_steps_never_wait_for_the_gpu() -> None:
    """torch tells of every operation that makes the host wait; there is none between two waits for step k - 2."""
    Path("count.py").write_text(
        """
import json, warnings, torch
from tests.gpu.test_gpu_cuda_graphs import task
from evenstep.plan import Plan
from evenstep.training.cuda_graphs import runner
runner.LEAST_GAIN = 0.0
from evenstep.training.trainer import Trainer
from evenstep.training.team import join
from evenstep.training.loop import train
from pathlib import Path
plan = Plan(batch=40, steps=60, devices=("cuda:0",), epochs=None, resident=True, check_every=0)
team = join("single", ("cuda:0",))
job = Trainer(plan, task(), Path("here"), team)
steps = train(job.run, job.stepper, plan, dict)
for _ in range(35):
    next(steps)
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("warn")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(20):
        next(steps)
torch.cuda.set_sync_debug_mode("default")
print(json.dumps({"said": job.stepper.messages, "waits": [str(one.message) for one in caught]}))
"""
    )
    ended = subprocess.run([sys.executable, "count.py"], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert any("replayed" in line for line in found["said"]), found
    assert found["waits"] == []
