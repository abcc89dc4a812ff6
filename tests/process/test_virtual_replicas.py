"""With --virtual-replicas, a run has the same bits on any number of devices."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.distributed.gradient_tree import GradientTree
from evenstep.distributed.shm.native import load
from evenstep.errors import TaskError
from evenstep.plan import Plan
from evenstep.record import Record
from evenstep.training import replica_seeds
from evenstep.training.team import Team
from evenstep.training.virtual_replicas import VirtualLogs
from tests.fleet import furthest, result, run_jobs, run_processes
from tests.marks import first_is_quick, num_steps
from tests.process import virtual_loop_script
from tests.small_tasks import LOSSES, MODELS, OPTIMIZERS

STEPS = num_steps(21, 60)
BATCH = 17  # virtual replicas of 5, 4, 4 and 4 samples; the last batch of an epoch has one sample
V = 4
WORLDS = {"single": 1, "dp-2": 1, "dp-3": 1, "dp-4": 1, "ddp-1": 1, "ddp-2": 2, "ddp-3": 3, "ddp-4": 4}
MATRIX = [
    f"{model}/{optimizer}/{loss}/dropout --accumulate {accumulate}"
    for model, optimizer, loss, accumulate in product(MODELS, OPTIMIZERS, LOSSES, (1, 2))
]
MORE = [
    "mlp/adamw/mean/dropout --precision bf16",
    "mlp/adamw/mean/dropout --precision fp16",
    "cnn/sgd/mean --precision fp64 --accumulate 3",
    "gpt/adamw/mean/dropout --virtual-replicas 7",
    "mlp/adamw/penalty",
    "heads/sgd/pair",
    "experts/adamw/mean",
    "tied/adamw/mean",
    "weight_norm/sgd/mean",
    "mlp/adamw/mean/complex",
    "mlp/adamw/mean/stream",
    "mlp/adamw/mean/loader",
    "mlp/adamw/mean/augment_batch",
    "mlp/adamw/mean/scaler",
    "mlp/adamw/mean/weighted",
]
CASES = [*MATRIX, *MORE]
QUICK = {
    "mlp/adamw/mean/dropout --accumulate 1": ("dp-2", "ddp-2"),
    "cnn/sgd/mean/dropout --accumulate 2": ("ddp-2",),
    "gpt/adamw/pair/dropout --accumulate 1": ("ddp-4",),
}


def plan(where: str, **more: object) -> Plan:
    strategy, _, num = where.partition("-")
    values = {"batch": BATCH, "steps": STEPS, "virtual_replicas": V, "clip": 1.0, **more}
    return Plan(strategy=strategy, devices=("cpu",) * int(num or 1), **values)


def digest(run: Path) -> str:
    """Of weights and optimizer state of the latest checkpoint."""
    content = hashlib.sha256()
    for file in ("weights", "optimizer"):
        for name, tensor in sorted(load_file(run / "checkpoints" / "latest" / f"{file}.safetensors").items()):
            content.update(name.encode())
            content.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


@pytest.mark.parametrize(("loss", "accumulate"), first_is_quick([("pair", 2), ("mean", 1)]))
def test_they_learn_what_one_device_learns(tmp_path: Path, loss: str, accumulate: int) -> None:
    key = f"mlp/adamw/{loss}"
    plans = {"plain": {"virtual_replicas": None}, "virtual": {"accumulate": accumulate}}
    jobs = [(name, plan("single", precision="fp64", threads=1, **more), key) for name, more in plans.items()]
    run_jobs(tmp_path, 1, jobs)
    plain, virtual = (result(tmp_path, name) for name in plans)
    assert virtual.record.losses == pytest.approx(plain.record.losses, rel=1e-9)
    assert furthest(virtual.weights, plain.weights) < 1e-9
    for ours, theirs in zip(virtual.record.evaluations, plain.record.evaluations, strict=True):
        assert ours.values == pytest.approx(theirs.values, rel=1e-9)


def name(where: str, case: str) -> str:
    return f"{where}_{case}".replace("/", "-").replace(" ", "-")


def job(where: str, case: str) -> tuple[str, Plan, str]:
    key, *words = case.split()
    names = [flag.removeprefix("--").replace("-", "_") for flag in words[::2]]
    values = {flag: int(one) if one.isdigit() else one for flag, one in zip(names, words[1::2], strict=True)}
    return name(where, case), plan(where, **values), key


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    of_this = [item.callspec.params for item in items if "case" in item.callspec.params]
    wanted = dict.fromkeys((where, one["case"]) for one in of_this for where in ("single", one["where"]))
    for size in sorted({WORLDS[where] for where, _ in wanted}):
        run_jobs(folder, size, [job(*one) for one in wanted if WORLDS[one[0]] == size])
    return folder


def refuse_different(run: Path, reference: Path) -> None:
    ours, theirs = Record.read(run), Record.read(reference)
    assert ours.losses == theirs.losses
    assert [one.grad_norm for one in ours.steps] == [one.grad_norm for one in theirs.steps]
    assert [one.logged for one in ours.steps] == [one.logged for one in theirs.steps]
    assert [one.values for one in ours.evaluations] == [one.values for one in theirs.evaluations]
    assert digest(run) == digest(reference)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("where", "case"),
    [
        pytest.param(where, case, marks=() if where in QUICK.get(case, ()) else pytest.mark.slow)
        for where in WORLDS
        for case in CASES
        if where != "single"
    ],
)
def test_the_same_bits_on_any_number_of_devices(trained: Path, where: str, case: str) -> None:
    refuse_different(trained / name(where, case), trained / name("single", case))
    assert len(Record.read(trained / name("single", case)).losses) == STEPS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_bits_on_eight_devices(tmp_path: Path) -> None:
    jobs = [(key, {"accumulate": accumulate}) for key in MATRIX[:1] for accumulate in (1, 2)]
    for where, size in (("single", 1), ("ddp-8", 8), ("dp-8", 1)):
        plans = [(f"{where}-{more}", plan(where, virtual_replicas=8, **more), key.split()[0]) for key, more in jobs]
        run_jobs(tmp_path, size, plans)
        for _, more in jobs:
            refuse_different(tmp_path / f"{where}-{more}", tmp_path / f"single-{more}")


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_bits_over_collectives_of_torch(tmp_path: Path, num: int) -> None:
    for where, size, more in (("single", 1, {}), (f"ddp-{num}", num, {"check_collectives": True})):
        jobs = [(f"{where}-{key.split('/')[0]}", plan(where, steps=14, **more), key) for key in OVER_COLLECTIVES]
        run_jobs(tmp_path, size, jobs)
    for key in ("mlp", "heads"):
        refuse_different(tmp_path / f"ddp-{num}-{key}", tmp_path / f"single-{key}")


OVER_COLLECTIVES = ("mlp/adamw/mean/dropout", "heads/sgd/pair")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "num"), [("ddp", 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("dp", 3), ("ddp", 3)))]
)
def test_a_custom_loop_of_two_models_has_the_same_bits(tmp_path: Path, strategy: str, num: int) -> None:
    script = Path(virtual_loop_script.__file__)
    run_processes(script, ["single", "1", str(tmp_path / "one")], 1, tmp_path / "logs-one")
    size = num if strategy == "ddp" else 1
    run_processes(script, [strategy, str(num), str(tmp_path / "other")], size, tmp_path / "logs-other")
    (expected,) = (file.read_text() for file in tmp_path.glob("one-*"))
    assert [file.read_text() for file in tmp_path.glob("other-*")] == [expected] * size


TASK = """
import os, random, signal
import torch
from torch import nn
from torch.nn import functional as F
import evenstep

x = torch.randn(103, 20)
y = torch.randint(0, 5, (103,))

def loss(model, batch):
    if evenstep.progress().step == int(os.environ.get("DIES_AT", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)
    logits = model(batch[0])
    # From a later step on, the loss draws from Python's generator.
    factor = 1.0 + 0.1 * random.random() if evenstep.progress().step > 15 else 1.0
    evenstep.log({"accuracy": logits.argmax(1) == batch[1], "factor": factor})
    return F.cross_entropy(logits, batch[1]) * factor

def task():
    return evenstep.Task(
        model=lambda: nn.Sequential(nn.Linear(20, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 5)),
        train=(x, y),
        valid=(x[:41], y[:41]),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        predict=lambda model, batch: (model(batch[0]), batch[1]),
        scores={"spread": lambda predictions, targets: predictions.std()},
        ema=0.9,
        clip=1.0,
    )
"""


def evenstep_(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", *words]
    # OMP_NUM_THREADS is left to evenstep.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env={**environment, **variables})


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_and_resumed_on_other_devices_is_the_same_run() -> None:
    Path("my_task.py").write_text(TASK)
    words = (
        "--batch",
        "17",
        "--virtual-replicas",
        "4",
        "--accumulate",
        "2",
        "--steps",
        "60",
        "--checkpoint-every",
        "10",
    )
    done = evenstep_("train", "my_task.py", *words, "--name", "whole")
    assert done.returncode == 0, done.stderr
    assert "global batch 17 = 4 virtual replicas x 2-3 x 2 micro-batches" in done.stderr
    four = evenstep_(
        *("train", "my_task.py", *words, "--name", "four", "--strategy", "ddp", "--devices", "cpu,cpu,cpu,cpu"),
        DIES_AT="25",
    )
    assert four.returncode == 1
    one = evenstep_("train", "--resume", "runs/four", "--devices", "cpu", "--name", "one", DIES_AT="45")
    assert one.returncode != 0
    two = evenstep_("train", "--resume", "runs/one", "--devices", "cpu,cpu", "--name", "two")
    assert two.returncode == 0, two.stderr
    assert "bits" not in two.stderr
    whole, last = Record.read("runs/whole"), Record.read("runs/two")
    assert last.plan.strategy == "ddp"
    assert [step.step for step in last.steps] == list(range(43, 61))  # saved at the end of epochs, too
    assert last.losses == whole.losses[42:]
    assert [one.logged for one in last.steps] == [one.logged for one in whole.steps[42:]]
    assert last.evaluations[-1].values == whole.evaluations[-1].values
    assert digest(Path("runs/two")) == digest(Path("runs/whole"))
    assert whole.machine["numerics"]["threads"] == 1
    again = evenstep_("train", "--resume", "runs/two", "--steps", "61", "--threads", "2", "--name", "again")
    assert "results may not be bit-identical to the run before: threads per process 1 before, 2 now" in again.stderr


@pytest.mark.slow
def test_a_run_that_is_restarted_after_a_crash_is_the_same_run() -> None:
    dies_once = "not os.path.exists('died') and not open('died', 'w').close() and os.kill(os.getpid(), signal.SIGKILL)"
    Path("my_task.py").write_text(TASK.replace("os.kill(os.getpid(), signal.SIGKILL)", dies_once))
    words = (
        "train",
        "my_task.py",
        "--batch",
        "17",
        "--virtual-replicas",
        "4",
        "--steps",
        "30",
        "--checkpoint-every",
        "10",
    )
    done = evenstep_(*words, "--name", "whole")
    assert done.returncode == 0, done.stderr
    crashed = evenstep_(*words, "--name", "crashed", "--devices", "cpu,cpu,cpu", "--restarts", "1", DIES_AT="25")
    assert crashed.returncode == 0, crashed.stderr
    assert Path("died").exists()
    assert digest(Path("runs/crashed")) == digest(Path("runs/whole"))


GATHERS = TASK.replace("logits = model(batch[0])", "logits = evenstep.gather(model(batch[0]))")


@pytest.mark.parametrize(
    ("task", "words", "said"),
    first_is_quick(
        [
            (
                GATHERS,
                (),
                "evenstep.gather makes a loss of the whole batch, and --virtual-replicas 4 computes it in parts",
            ),
            (
                TASK,
                ("--devices", "5"),
                "4 virtual replicas cannot be shared by 5 devices; use --virtual-replicas 5 or more",
            ),
            (
                TASK,
                ("--devices", "2", "--sync-batchnorm"),
                "--sync-batchnorm computes with the statistics of the whole",
            ),
        ]
    ),
)
def test_what_cannot_have_the_same_bits_is_refused(task: str, words: tuple[str, ...], said: str) -> None:
    Path("my_task.py").write_text(task)
    done = evenstep_("train", "my_task.py", "--steps", "2", "--virtual-replicas", "4", *words)
    assert done.returncode != 0
    assert said in done.stderr


X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randn(64, 1, generator=torch.Generator().manual_seed(1))


class Loop:
    """A loop of four steps in this process."""

    def __init__(self, team: Team, model: nn.Module, loss: Any, is_shuffled: bool = True) -> None:
        self.team, self._loss = team, loss
        self.model = team.wrap(model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = iter(team.loader((X, Y), batch=16, shuffle=is_shuffled))

    def step(self) -> float:
        loss = float(self.team.backward(self._loss, self.model, next(self.batches)))
        self.team.step(self._optimizer)
        return loss

    def weights(self) -> list[list[float]]:
        return [weight.flatten().tolist() for weight in self.model.module.state_dict().values()]


def joined(*devices: str, virtual_replicas: int = 4) -> Team:
    return evenstep.join("dp" if len(devices) > 1 else "single", devices=[*devices], virtual_replicas=virtual_replicas)


def noisy(model: Any, batch: Any) -> torch.Tensor:
    noise = torch.rand(1) + random.random() + np.random.rand()
    return nn.functional.mse_loss(model(batch[0] * noise.to(batch[0])), batch[1])


def test_draws_on_the_host_are_those_of_virtual_replicas_on_different_devices() -> None:
    found = []
    for devices in (("cpu",), ("cpu", "cpu:0")):
        torch.manual_seed(0)
        loop = Loop(joined(*devices), nn.Linear(16, 1), noisy)
        losses = [loop.step() for _ in range(4)]
        measured = loop.team.evaluate(
            lambda model, batch: {"loss": noisy(model, batch)}, loop.model, loop.team.loader((X, Y), batch=16)
        )
        found.append((losses, loop.weights(), measured))
    assert found[0] == found[1]


def test_without_a_c_compiler_the_draws_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for library in (load(), None):
        monkeypatch.setattr(replica_seeds, "load", lambda library=library: library)
        torch.manual_seed(0)
        loop = Loop(joined("cpu"), nn.Linear(16, 1), noisy)
        found.append(([loop.step() for _ in range(4)], loop.weights()))
    assert found[0] == found[1]


def test_a_loss_that_begins_to_draw_is_computed_once() -> None:
    num_calls = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return noisy(model, batch) if num_calls > 12 else nn.functional.mse_loss(model(batch[0]), batch[1])

    loop = Loop(joined("cpu"), nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), loss)
    random.seed(5)
    np.random.seed(5)
    drawn = []
    for _ in range(4):
        loop.step()
        drawn.append((random.random(), np.random.randn()))
    assert num_calls == 16
    assert loop.model.module[1].num_batches_tracked == 4
    random.seed(5)
    np.random.seed(5)
    assert drawn == [(random.random(), np.random.randn()) for _ in range(4)]


LATE_DRAWS = [
    (0.9304641525773094, 0.16160038002022703, 0.36969608068466187, 4489308017910814033),
    (0.5996709859670496, 0.577652373855038, 0.8790075778961182, 2282052655063092476),
    (0.3884372964524808, 0.722026097523637, 0.8386820554733276, 2731103725870767776),
    (0.19343907521176484, 0.038150406566515915, 0.7665038108825684, 8012324655511144164),
]
"""Of the third step, as they were when each generator was seeded for itself."""


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")])
def test_draws_that_begin_in_the_third_step_are_those_of_every_version(devices: tuple[str, ...]) -> None:
    drawn: list[tuple[Any, ...]] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if evenstep.progress().step == 3:
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item(), torch.initial_seed()))
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    loop = Loop(joined(*devices), nn.Linear(16, 1), loss)
    random.seed(5)
    np.random.seed(5)
    np.random.randn()
    for _ in range(4):
        loop.step()
    assert drawn == LATE_DRAWS
    after = random.random(), np.random.randn(), np.random.randn()
    random.seed(5)
    np.random.seed(5)
    np.random.randn()
    assert after == (random.random(), np.random.randn(), np.random.randn())


def test_an_evaluation_between_two_steps_changes_no_draws() -> None:
    found = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        loop = Loop(joined("cpu"), nn.Linear(16, 1), noisy)
        for _ in range(3):
            loop.step()
            if evaluates:
                loader = loop.team.loader((X, Y), batch=16)
                loop.team.evaluate(lambda model, batch: {"loss": noisy(model, batch)}, loop.model, loader)
        found.append((loop.weights(), torch.rand(1).item()))
    assert found[0] == found[1]


class Shared(nn.Module):
    """Backward hands both parameters the same memory, and the second one is not used in every virtual replica."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_used = bool(x[0, 0] > 0)
        weight = self.one.view(4, 4) + self.other.view(4, 4) if is_used else self.one.view(4, 4)
        return x @ weight.view(16, 1)


def test_gradients_that_share_memory_or_are_missing_have_the_same_bits() -> None:
    found = []
    for devices in (("cpu",), ("cpu", "cpu"), ("cpu", "cpu", "cpu", "cpu")):
        loop = Loop(joined(*devices), Shared(), lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
        found.append(([loop.step() for _ in range(4)], loop.weights()))
    assert found[0] == found[1] == found[2]


class Reentrant(nn.Module):
    """One layer in three checkpoints: backward adds to its gradient three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + 0 * self.last.weight.sum()
        for _ in range(3):
            x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=True)
        return self.last(x)


def test_gradients_that_backward_adds_in_parts_have_the_same_bits() -> None:
    found = []
    for devices in (("cpu",), ("cpu", "cpu")):
        torch.manual_seed(0)
        loop = Loop(
            joined(*devices, virtual_replicas=2),
            Reentrant(),
            lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        )
        found.append(([loop.step() for _ in range(4)], loop.weights()))
    assert found[0] == found[1]


def squared(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def num_sums_left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every sum that is left to a backward."""
    left: list[int] = []
    leave = GradientTree.leave
    monkeypatch.setattr(GradientTree, "leave", lambda tree: (left.append(1), leave(tree)))
    return left


def test_after_the_first_step_a_backward_adds_to_gradients_of_its_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = num_sums_left(monkeypatch)
    loop = Loop(joined("cpu"), nn.Linear(16, 1), squared)
    found = []
    for _ in range(3):
        loop.step()
        found.append(len(left))
    assert found == [0, 2, 4]


def clamp(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.clamp_(-0.01, 0.01)


def test_hooks_on_gradients_see_those_of_one_virtual_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    left = num_sums_left(monkeypatch)
    found = []
    for devices in (("cpu",), ("cpu", "cpu")):
        torch.manual_seed(0)
        loop = Loop(joined(*devices), nn.Linear(16, 1), squared)
        for weights in loop.model.weights_of:
            for weight in weights:
                weight.register_post_accumulate_grad_hook(clamp)
        found.append(([loop.step() for _ in range(4)], loop.weights()))
    assert found[0] == found[1]
    assert not left


def test_layers_that_are_trained_later_are_looked_at_then() -> None:
    found = []
    for devices in (("cpu",), ("cpu", "cpu")):
        torch.manual_seed(0)
        loop = Loop(joined(*devices, virtual_replicas=2), Reentrant(), squared)
        for replica in loop.model.loss_modules:
            replica.model.layer.requires_grad_(False)
        losses = [loop.step() for _ in range(2)]
        for replica in loop.model.loss_modules:
            replica.model.layer.requires_grad_(True)
        found.append((losses, [loop.step() for _ in range(2)], loop.weights()))
    assert found[0] == found[1]


class Joined(nn.Module):
    """Parameters whose gradients are parts of one tensor, that of the joined ones."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Parameter(torch.randn(4, 16)) for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(x @ torch.cat([self.query, self.key]).t()))


class Deepening(Reentrant):
    """Uses its tied layer once in two steps, and then three times: backward adds in parts from then on."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        for _ in range(*DEPTH):
            x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=True)
        return self.last(x)


DEPTH = [1]


@pytest.mark.parametrize("network", [Joined, Deepening])
def test_networks_for_which_a_backward_cannot_add_have_the_same_bits(
    network: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = num_sums_left(monkeypatch)
    found = []
    for devices in (("cpu",), ("cpu", "cpu")):
        torch.manual_seed(0)
        loop = Loop(joined(*devices), network(), squared)
        losses = []
        for depth in (1, 1, 3, 3):
            DEPTH[:] = [depth]
            losses.append(loop.step())
        found.append((losses, loop.weights()))
    assert found[0] == found[1]
    assert not left


def test_a_backward_that_begins_to_add_in_parts_is_refused() -> None:
    model = Reentrant()
    loop = Loop(joined("cpu"), model, squared)
    with monkeypatched_checkpoint():
        loop.step()
        loop.step()
    with pytest.raises(
        TaskError, match=r"more than once to the gradient of a parameter of shape \(16,.*use_reentrant=False"
    ):
        loop.step()
    assert all(weight.grad is None for weight in model.parameters())


@contextmanager
def monkeypatched_checkpoint() -> Iterator[None]:
    """Inside, checkpoints are not reentrant."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "checkpoint", lambda work, x, use_reentrant: work(x))
        yield


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")])
def test_a_step_that_fails_leaves_nothing_behind(devices: tuple[str, ...]) -> None:
    num_calls = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 8:
            raise ValueError("a bad sample")
        return noisy(model, batch)

    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    loop = Loop(joined(*devices), model, loss)
    loop.step()
    before, python, numpy = loop.weights(), random.getstate(), np.random.get_state()
    with pytest.raises(ValueError, match="a bad sample"):
        loop.step()
    assert loop.weights() == before
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy[1])
    assert all(weight.grad is None for weights in loop.model.weights_of for weight in weights)
    loop.step()
    assert loop.model.module[1].num_batches_tracked == 2


def test_an_evaluation_that_fails_leaves_the_generators_as_they_were() -> None:
    team = joined("cpu")
    model = team.wrap(nn.Linear(16, 1))
    before = random.getstate()

    def fails(model: Any, batch: Any) -> Any:
        random.random()
        raise ValueError("a bad sample")

    with pytest.raises(ValueError, match="a bad sample"):
        team.evaluate(fails, model, team.loader((X, Y), batch=16))
    assert random.getstate() == before


def test_logged_sums_belong_to_the_names_that_were_sent() -> None:
    communication = SimpleNamespace(is_off=False)
    world: Any = SimpleNamespace(
        size=2, communication=communication, gather=lambda own: [own, own], total=lambda _: None
    )
    names = ["first"]
    logs = VirtualLogs(world, names, num_places=1)
    logs.place = 0
    logs.take([("third", 3.0)], num_samples=1)
    names.append("second")  # another step has met it since
    logs.take_sums([1.0, 1.0, 1.0])
    assert logs.means() == {"first": 1.0, "third": 3.0}


def test_a_run_that_is_resumed_with_virtual_replicas_says_that_it_had_none() -> None:
    Path("my_task.py").write_text(TASK)
    done = evenstep_("train", "my_task.py", "--batch", "16", "--steps", "2", "--name", "plain")
    assert done.returncode == 0, done.stderr
    again = evenstep_("train", "--resume", "runs/plain", "--steps", "3", "--virtual-replicas", "4", "--name", "again")
    assert again.returncode == 0, again.stderr
    assert "results may not be bit-identical to the run before: --virtual-replicas none before, 4 now" in again.stderr
