"""`--link` on one machine, where every rank stands for a machine: what is exact, what is close, what a resume keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from evenstep.plan import Plan
from evenstep.record import Record
from evenstep.sampling.order import Span
from evenstep.sampling.samplers import Shuffled
from tests.fleet import bits_of, furthest, result, run_jobs, run_processes
from tests.marks import first_is_quick
from tests.small_tasks import NUM_SAMPLES, small_task

TASK = "mlp/adamw/mean"
STEPS, CUT = 16, 8
LINKS = ("diloco:4", "local:4", "powersgd:2", "topk:0.2", "bf16")
PLAN = Plan(
    strategy="ddp",
    devices=("cpu", "cpu"),
    batch=20,
    steps=STEPS,
    precision="fp64",
    threads=1,
    checkpoint_every=CUT,
    keep=9,
)


def name(link: str, *more: object) -> str:
    return "-".join(map(str, (link.replace(":", "-"), *more)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("links")
    links = {"plain": None, "local-1": "local:1", **{name(link): link for link in LINKS}}
    jobs = [(label, replace(PLAN, link=link), TASK) for label, link in links.items()]
    resumed = [(name(link, "resumed"), replace(PLAN, link=link, resume=str(cut(folder, link))), TASK) for link in LINKS]
    pairs = [("pairs", replace(PLAN, link="local:4"), "mlp/sgd/pair")]
    # Last: what checks collectives stays in a process. Without shared memory, there is something for auto to plan.
    auto = [("auto", replace(PLAN, link="auto", check_collectives=True), TASK)]
    run_jobs(folder, 2, [*jobs, *resumed, *pairs, *auto])
    return folder


def cut(folder: Path, link: str) -> Path:
    return folder / name(link) / "checkpoints" / f"step-{CUT:08d}"


def test_local_steps_of_one_are_ddp_to_the_bit(trained: Path) -> None:
    assert bits_of(trained / "local-1") == bits_of(trained / "plain")


def test_plans_that_auto_tries_between_single_ranks_are_exact(trained: Path) -> None:
    plain, auto = result(trained, "plain"), result(trained, "auto")
    assert furthest(auto.weights, plain.weights) < 1e-9
    assert auto.record.losses == pytest.approx(plain.record.losses, rel=1e-9)


@pytest.mark.parametrize(
    ("link", "distance"), [("bf16", 0.02), ("powersgd:2", 0.2), ("topk:0.2", 0.3), ("local:4", 0.2), ("diloco:4", 0.8)]
)
def test_a_lossy_link_trains_nearly_the_same_model(trained: Path, link: str, distance: float) -> None:
    plain, lossy = result(trained, "plain"), result(trained, name(link))
    assert 0 < furthest(lossy.weights, plain.weights) < distance
    assert len(lossy.record.losses) == STEPS
    # The first loss is that of the same weights and samples: nothing was averaged before it.
    assert lossy.record.losses[0] == pytest.approx(plain.record.losses[0], rel=1e-12)
    assert lossy.record.losses[-1] == pytest.approx(plain.record.losses[-1], rel=0.1)


@pytest.mark.parametrize("link", LINKS)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(trained: Path, link: str) -> None:
    went_on, resumed = bits_of(trained / name(link)), bits_of(trained / name(link, "resumed"))
    losses = went_on.pop("losses"), resumed.pop("losses")
    assert losses[0][CUT:] == losses[1]
    valid = went_on.pop("valid"), resumed.pop("valid")
    assert valid[0][-1] == valid[1][-1]
    assert went_on == resumed


ROUND_ENDS = (4, 6, 8, 12, 16)
"""Every four steps, at the ends of epochs (6 and 12), and at checkpoints (8 and 16)."""
OUTER = {
    "local:4": lambda weights: torch.optim.SGD(weights, lr=1.0),
    "diloco:4": lambda weights: torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True),
}


class ByHand:
    """Local steps as the paper writes them, in one process: a model for each of two ranks, and the one they share."""

    def __init__(self, outer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.task = small_task(TASK)
        torch.manual_seed(0)
        self.shared = self.task.model().double()
        self.outer = outer(self.shared.parameters())
        self.ranks = [deepcopy(self.shared) for _ in range(2)]
        self.inner = [self.task.optimizer(rank.parameters()) for rank in self.ranks]
        self.rates = [torch.optim.lr_scheduler.CosineAnnealingLR(one, STEPS) for one in self.inner]

    def train(self) -> dict[str, torch.Tensor]:
        for number, ids in enumerate(islice(self._batches(), STEPS), 1):
            # The first rank has the larger half.
            for rank, own in enumerate((ids[: (len(ids) + 1) // 2], ids[(len(ids) + 1) // 2 :])):
                x, y = self.task.train
                total = F.cross_entropy(self.ranks[rank](x[own].double()), y[own], reduction="sum")
                # A sample counts as much on either rank, also where their shares differ by one.
                (2 * total / len(ids)).backward()
                self.inner[rank].step()
                self.inner[rank].zero_grad()
                self.rates[rank].step()
            if number in ROUND_ENDS:
                self._end_round()
        return dict(self.shared.named_parameters())

    def _batches(self) -> Iterator[list[int]]:
        for epoch in count():
            ids = Shuffled().order(NUM_SAMPLES, 0, 20).ids(Span(epoch, 0, NUM_SAMPLES)).tolist()
            yield from (ids[start : start + 20] for start in range(0, NUM_SAMPLES, 20))

    @torch.no_grad()
    def _end_round(self) -> None:
        for shared, *own in zip(self.shared.parameters(), *(rank.parameters() for rank in self.ranks), strict=True):
            shared.grad = shared - sum(own) / 2
        self.outer.step()
        for shared, *own in zip(self.shared.parameters(), *(rank.parameters() for rank in self.ranks), strict=True):
            for weight in own:
                weight.copy_(shared)
        for first, second in zip(*(one.state.values() for one in self.inner), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                mean = (first[key] + second[key]) / 2
                first[key].copy_(mean)
                second[key].copy_(mean)


@pytest.mark.parametrize("link", sorted(OUTER))
def test_local_steps_are_those_of_a_loop_by_hand(trained: Path, link: str) -> None:
    expected = ByHand(OUTER[link]).train()
    found = result(trained, name(link)).weights
    assert furthest(found, expected) < 1e-12
    # Not by chance: without a round's end they are far from it.
    assert furthest(result(trained, "plain").weights, expected) > 1e-4


def test_losses_of_local_steps_are_those_of_the_global_batch(trained: Path) -> None:
    """As sums and counts, which ranks exchange at the end of a round."""
    record = Record.read(trained / "pairs")
    assert [step.step for step in record.steps] == list(range(1, STEPS + 1))
    assert [step.samples for step in record.steps[:6]] == [20, 20, 20, 20, 20, 3]
    assert all(step.count > 0 for step in record.steps)
    assert record.losses[-1] < record.losses[0]


@pytest.mark.parametrize("link", first_is_quick(["powersgd:2", "topk:0.2", "local:4", "diloco:4"]))
def test_a_run_resumes_on_another_number_of_ranks(trained: Path, link: str) -> None:
    label = name(link, "three")
    run_jobs(
        trained, 3, [(label, replace(PLAN, devices=("cpu",) * 3, link=link, resume=str(cut(trained, link))), TASK)]
    )
    same, other = result(trained, name(link)), result(trained, label)
    # The first step is taken from the same weights, of the same samples.
    assert other.record.losses[0] == pytest.approx(same.record.losses[CUT], rel=1e-9)
    assert furthest(other.weights, same.weights) < 0.3


def test_a_resume_without_the_link_trains_on_exactly(trained: Path) -> None:
    resume = str(cut(trained, "powersgd:2"))
    run_jobs(trained, 1, [("alone", Plan(batch=20, steps=STEPS, precision="fp64", threads=1, resume=resume), TASK)])
    assert len(result(trained, "alone").record.losses) == STEPS - CUT


ERRORS = """
import sys
import torch
from safetensors.torch import load_file
import evenstep
from evenstep.plan import parse_link
from evenstep.strategies.compression import compression

team = evenstep.join("ddp", ["cpu"] * 3)
saved = load_file(sys.argv[1])
made = compression(parse_link(sys.argv[2]), torch.distributed.group.WORLD)
made.load_state(saved)
again = made.state()
assert again.keys() == saved.keys() and any(key.endswith("/error") for key in saved), sorted(again)
for key, value in saved.items():
    torch.testing.assert_close(again[key], value, rtol=1e-12, atol=1e-15)
"""


@pytest.mark.parametrize("link", first_is_quick(["powersgd:2", "topk:0.2"]))
def test_errors_of_two_machines_are_those_of_three_with_the_same_sum(trained: Path, tmp_path: Path, link: str) -> None:
    script = tmp_path / "errors.py"
    script.write_text(ERRORS)
    file = cut(trained, link) / "link.safetensors"
    assert any(float(value.abs().max()) > 0 for value in load_file(file).values())
    run_processes(script, [str(file), link], 3, tmp_path / "logs")


UNLIKE = """
import os
import torch
from torch import nn
from evenstep import Task

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def model():
    if os.environ.get("UNLIKE"):
        torch.manual_seed(100 * int(os.environ.get("RANK", "0")))
    else:
        torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def task() -> Task:
    return Task(
        model=model,
        train=(x, (x.sum(1) > 0).long()),
        loss=lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        batch=8,
        epochs=1,
    )
"""


@pytest.mark.slow
@pytest.mark.parametrize("link", ["local:4", "powersgd:1"])
def test_replicas_that_were_built_unlike_start_alike(tmp_path: Path, link: str) -> None:
    """Each rank draws its own weights: those of rank 0 count, or rounds would average unrelated models."""
    (tmp_path / "my_task.py").write_text(UNLIKE)
    for label, mistake in (("right", {}), ("unlike", {"UNLIKE": "1"})):
        command = [sys.executable, "-m", "evenstep", "train", "my_task.py", "--devices", "2", "--link", link]
        environment = {**os.environ, **mistake}
        subprocess.run([*command, "--name", label], cwd=tmp_path, env=environment, check=True, timeout=100)
    right, unlike = (bits_of(tmp_path / "runs" / label) for label in ("right", "unlike"))
    assert right == unlike


LOGGING = """
import evenstep
import torch
from torch import nn

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def loss(net, batch):
    evenstep.log({"mean": batch[0].mean()})
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def task():
    return evenstep.Task(
        model=lambda: nn.Linear(4, 2),
        train=(x, (x.sum(1) > 0).long()),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=8,
        epochs=1,
    )
"""


def test_logged_values_of_local_steps_are_those_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(LOGGING)
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", "--devices", "2"]
    for label, more in (("plain", []), ("local", ["--link", "local:4"])):
        subprocess.run([*command, "--name", label, *more], cwd=tmp_path, check=True, timeout=100)
    runs = [Record.read(tmp_path / "runs" / label) for label in ("plain", "local")]
    plain, local = ([step.logged["mean"] for step in run.steps] for run in runs)
    assert len(plain) == 8
    assert local == pytest.approx(plain)
