"""`--link` on one machine, where every rank stands for a machine: what is exact, what is close, what a resume keeps."""

from __future__ import annotations

import json
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
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from evenstep.plan import Plan
from evenstep.record import Record
from evenstep.sampling.order import Span
from evenstep.sampling.samplers import Shuffled
from tests.fleet import bits_of, furthest, newest_weights, result, run_jobs, run_processes
from tests.marks import first_is_quick
from tests.small_tasks import NUM_SAMPLES, small_task

TASK = "mlp/adamw/mean"
STEPS, CUT = 16, 8
LINKS = ("streaming:4:2", "diloco:4", "local:4", "powersgd:2", "topk:0.2", "bf16")
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
    links = {"plain": None, "local-1": "local:1", "streaming-1": "streaming:1", **{name(link): link for link in LINKS}}
    jobs = [(label, replace(PLAN, link=link), TASK) for label, link in links.items()]
    resumed = [(name(link, "resumed"), replace(PLAN, link=link, resume=str(cut(folder, link))), TASK) for link in LINKS]
    pairs = [("pairs", replace(PLAN, link="local:4"), "mlp/sgd/pair")]
    # Last: what checks collectives stays in a process. Without shared memory, there is something for auto to plan.
    auto = [("auto", replace(PLAN, link="auto", check_collectives=True), TASK)]
    run_jobs(folder, 2, [*jobs, *resumed, *pairs, *auto])
    return folder


def cut(folder: Path, link: str) -> Path:
    return folder / name(link) / "checkpoints" / f"step-{CUT:08d}"


@pytest.mark.parametrize("link", ["local-1", "streaming-1"])
def test_local_steps_of_one_are_ddp_to_the_bit(trained: Path, link: str) -> None:
    assert bits_of(trained / link) == bits_of(trained / "plain")


def test_plans_that_auto_tries_between_single_ranks_are_exact(trained: Path) -> None:
    plain, auto = result(trained, "plain"), result(trained, "auto")
    assert furthest(auto.weights, plain.weights) < 1e-9
    assert auto.record.losses == pytest.approx(plain.record.losses, rel=1e-9)


@pytest.mark.parametrize(
    ("link", "distance"),
    [
        ("bf16", 0.02),
        ("powersgd:2", 0.2),
        ("topk:0.2", 0.3),
        ("local:4", 0.2),
        ("diloco:4", 0.8),
        ("streaming:4:2", 0.2),
    ],
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
    """Local steps as the paper writes them, in one process: a model for each rank, and the one they share."""

    def __init__(self, num_ranks: int, num_steps: int) -> None:
        self.task, self.num_steps = small_task(TASK), num_steps
        torch.manual_seed(0)
        self.shared = self.task.model().double()
        self.ranks = [deepcopy(self.shared) for _ in range(num_ranks)]
        self.inner = [self.task.optimizer(rank.parameters()) for rank in self.ranks]
        self.rates = [torch.optim.lr_scheduler.CosineAnnealingLR(one, num_steps) for one in self.inner]

    def train(self, batch: int) -> dict[str, torch.Tensor]:
        for number, ids in enumerate(islice(self._batches(batch), self.num_steps), 1):
            # The first ranks have the larger shares.
            for rank, own in enumerate(torch.tensor(ids).tensor_split(len(self.ranks))):
                x, y = self.task.train
                total = F.cross_entropy(self.ranks[rank](x[own].double()), y[own], reduction="sum")
                # A sample counts as much on any rank, also where their shares differ by one.
                (len(self.ranks) * total / len(ids)).backward()
                self.inner[rank].step()
                self.inner[rank].zero_grad()
                self.rates[rank].step()
            self.after(number)
        return dict(self.shared.named_parameters())

    def after(self, number: int) -> None:
        """After a step of every rank."""
        raise NotImplementedError

    def _batches(self, batch: int) -> Iterator[list[int]]:
        for epoch in count():
            ids = Shuffled().order(NUM_SAMPLES, 0, batch).ids(Span(epoch, 0, NUM_SAMPLES)).tolist()
            yield from (ids[start : start + batch] for start in range(0, NUM_SAMPLES, batch))

    def average_inner(self) -> None:
        for states in zip(*(one.state.values() for one in self.inner), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                mean = torch.stack([state[key] for state in states]).mean(0)
                for state in states:
                    state[key].copy_(mean)


class RoundsByHand(ByHand):
    """All weights are exchanged at the end of a round."""

    def __init__(self, outer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
        super().__init__(2, STEPS)
        self.outer = outer(self.shared.parameters())

    @torch.no_grad()
    def after(self, number: int) -> None:
        if number not in ROUND_ENDS:
            return
        for shared, *own in zip(self.shared.parameters(), *(rank.parameters() for rank in self.ranks), strict=True):
            shared.grad = shared - sum(own) / 2
        self.outer.step()
        for shared, *own in zip(self.shared.parameters(), *(rank.parameters() for rank in self.ranks), strict=True):
            for weight in own:
                weight.copy_(shared)
        self.average_inner()


class FragmentsByHand(ByHand):
    """Every fragment is sent in turn, and merged when the next one is sent; `sends` are its steps, by fragment."""

    def __init__(self, num_ranks: int, num_steps: int, sends: list[range], ends: set[int]) -> None:
        super().__init__(num_ranks, num_steps)
        self.sends, self.ends = sends, ends
        self.found = parameters_to_vector(self.shared.parameters()).detach()
        self.momentum = torch.zeros_like(self.found)
        self.under_way: tuple[slice, torch.Tensor] | None = None

    @torch.no_grad()
    def after(self, number: int) -> None:
        sent = [fragment for fragment, steps in enumerate(self.sends) if number in steps]
        if sent or number in self.ends:
            self._receive()
        if number in self.ends:
            self._join()
        for fragment in sent:
            size, num = len(self.found), len(self.sends)
            part = slice(size * fragment // num, size * (fragment + 1) // num)
            self.under_way = part, self._mean()[part]
        if number in self.ends:
            # Ranks are equal: what was sent last is there at once.
            self._receive()
            vector_to_parameters(self._mean(), self.shared.parameters())

    def _mean(self) -> torch.Tensor:
        return torch.stack([parameters_to_vector(rank.parameters()) for rank in self.ranks]).mean(0)

    def _join(self) -> None:
        mean = self._mean()
        for rank in self.ranks:
            vector_to_parameters(mean.clone(), rank.parameters())
        self.average_inner()

    def _receive(self) -> None:
        if self.under_way is None:
            return
        (part, mean), self.under_way = self.under_way, None
        gradient = self.found[part] - mean
        self.momentum[part] = 0.9 * self.momentum[part] + gradient
        self.found[part] -= 0.7 * (gradient + 0.9 * self.momentum[part])
        for rank in self.ranks:
            weights = parameters_to_vector(rank.parameters())
            weights[part] = (weights[part] + self.found[part]) / 2
            vector_to_parameters(weights, rank.parameters())


@pytest.mark.parametrize("link", sorted(OUTER))
def test_local_steps_are_those_of_a_loop_by_hand(trained: Path, link: str) -> None:
    expected = RoundsByHand(OUTER[link]).train(batch=20)
    found = result(trained, name(link)).weights
    assert furthest(found, expected) < 1e-12
    # Not by chance: without a round's end they are far from it.
    assert furthest(result(trained, "plain").weights, expected) > 1e-4


def test_fragments_are_those_of_a_loop_by_hand(trained: Path) -> None:
    sends = [range(2, STEPS + 1, 4), range(4, STEPS + 1, 4)]
    expected = FragmentsByHand(2, STEPS, sends, {6, 8, 12, 16}).train(batch=20)
    found = result(trained, name("streaming:4:2")).weights
    assert furthest(found, expected) < 1e-12
    assert furthest(result(trained, "plain").weights, expected) > 1e-4


def test_fragments_at_uneven_distances_of_three_ranks_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    """Six steps are cut by four fragments after 1, 3, 4 and 6; epochs of 15 steps, and the run of 37, end within."""
    plan = replace(PLAN, devices=("cpu",) * 3, batch=7, steps=37, link="streaming:6:4", checkpoint_every=None)
    run_jobs(tmp_path, 3, [("three", plan, TASK)])
    sends = [range(first, 38, 6) for first in (1, 3, 4, 6)]
    expected = FragmentsByHand(3, 37, sends, {15, 30, 37}).train(batch=7)
    found = result(tmp_path, "three")
    assert furthest(found.weights, expected) < 1e-12
    assert [step.step for step in found.record.steps] == list(range(1, 38))


def test_losses_of_local_steps_are_those_of_the_global_batch(trained: Path) -> None:
    """As sums and counts, which ranks exchange at the end of a round."""
    record = Record.read(trained / "pairs")
    assert [step.step for step in record.steps] == list(range(1, STEPS + 1))
    assert [step.samples for step in record.steps[:6]] == [20, 20, 20, 20, 20, 3]
    assert all(step.count > 0 for step in record.steps)
    assert record.losses[-1] < record.losses[0]


@pytest.mark.parametrize("link", first_is_quick(["powersgd:2", "streaming:4:2", "topk:0.2", "local:4", "diloco:4"], 2))
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
    links = {"plain": [], "local": ["--link", "local:4"], "streaming": ["--link", "streaming:4:2"]}
    for label, more in links.items():
        subprocess.run([*command, "--name", label, *more], cwd=tmp_path, check=True, timeout=100)
    runs = [Record.read(tmp_path / "runs" / label) for label in links]
    plain, *local = ([step.logged["mean"] for step in run.steps] for run in runs)
    assert len(plain) == 8
    assert local == [pytest.approx(plain)] * 2


SENT = """
import json
import sys
from pathlib import Path

from evenstep.distributed.machines import MachineSum
from evenstep.plan import Plan
from evenstep.training.trainer import perform
from tests.small_tasks import small_task

sent = []
start = MachineSum.start


def counted(self, message):
    sent.append(message.values.nbytes)
    return start(self, message)


MachineSum.start = counted
folder = Path(sys.argv[1])
for link in ("diloco:4", "streaming:4:4"):
    (folder / link).mkdir(exist_ok=True)
    plan = Plan.from_json(json.loads(sys.argv[2]) | {"link": link})
    for event in perform(plan, small_task("mlp/adamw/mean"), folder / link):
        pass
    (folder / link / "sent.json").write_text(json.dumps(sent))
    sent.clear()
"""


def test_a_fragment_is_its_part_of_the_weights_and_each_is_sent_once_in_a_round(tmp_path: Path) -> None:
    script = tmp_path / "sent.py"
    script.write_text(SENT)
    plan = replace(PLAN, batch=4, steps=19, checkpoint_every=None)
    run_processes(script, [str(tmp_path), json.dumps(plan.to_json())], 2, tmp_path / "logs")
    diloco, streaming = (
        json.loads((tmp_path / link / "sent.json").read_text()) for link in ("diloco:4", "streaming:4:4")
    )
    weights = sum(weight.nbytes for weight in newest_weights(tmp_path / "diloco:4").values())
    # Weights, and two averages of AdamW: after 4, 8, 12, 16 and 19 steps.
    assert diloco == [3 * weights] * 5
    # One after each step but the last, which ends the round.
    *fragments, end = streaming
    assert len(fragments) == 18
    assert max(fragments) <= weights / 4 + 8
    assert [sum(fragments[first : first + 4]) for first in (0, 4, 8, 12)] == [weights] * 4
    assert end == 3 * weights


TOGETHER = """
import os
import time
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

from evenstep import Task

here = Path(__file__).parent
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
calls = 0


def loss(net, batch):
    global calls
    calls += 1
    # Rank 0 has sent its first fragment, which rank 1 has not: the exchange holds up neither.
    if calls == 3 and os.environ["RANK"] == "0":
        (here / "sent").touch()
    while calls == 2 and os.environ["RANK"] == "1" and not (here / "sent").exists():
        time.sleep(0.01)
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def after(now):
    weights = torch.cat([weight.detach().reshape(-1) for weight in now.model.parameters()])
    with open(here / f"rank-{now.rank}.txt", "a") as file:
        print(now.step, sha256(weights.numpy().tobytes()).hexdigest(), file=file)


def task():
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Linear(32, 2)),
        train=(x, (x.sum(1) > 0).long()),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        after=after,
        batch=8,
        epochs=3,
    )
"""


def test_a_fragment_is_on_its_way_while_ranks_train_and_ends_leave_them_equal_to_the_bit(tmp_path: Path) -> None:
    """A rank that waited for another one after a send would wait forever."""
    (tmp_path / "my_task.py").write_text(TOGETHER)
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", "--devices", "2", "--link", "streaming:4:2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2))
    assert [line.split()[0] for line in first.splitlines()] == ["12", "24", "36"]
    assert first == second


KILLED = """
import os
import signal
from pathlib import Path

import torch
from torch import nn

from evenstep import Task

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
calls = 0


def loss(net, batch):
    global calls
    calls += 1
    marker = Path(os.environ["MARKER"])
    # After a fragment was sent at step 10, and before it arrives.
    if calls == 11 and os.environ["RANK"] == "1" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def task():
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)),
        train=(x, (x.sum(1) > 0).long()),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        batch=4,
        epochs=2,
    )
"""


def test_a_rank_that_is_killed_while_a_fragment_is_on_its_way_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(KILLED)
    command = [sys.executable, "-m", "evenstep", "train", "my_task.py", "--devices", "2", "--link", "streaming:4:2"]
    options = ["--restarts", "1", "--checkpoint-every", "5", "--audit"]
    (tmp_path / "no").touch()
    for label, marker in (("whole", "no"), ("killed", "yes")):
        environment = {**os.environ, "MARKER": str(tmp_path / marker)}
        run = [*command, *options, "--name", label]
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    assert "restart 1 of 1, from step-00000010" in done.stderr
    assert "64 samples x 2 epochs, 0 repeated, 0 missed" in done.stdout + done.stderr
    assert bits_of(tmp_path / "runs" / "killed") == bits_of(tmp_path / "runs" / "whole")


CLOCK = """
import json
import sys
from pathlib import Path

from evenstep.checkpoint import save_interval
from evenstep.plan import Plan
from evenstep.training.trainer import perform
from tests.small_tasks import small_task

save_interval.SAVE_SECONDS = save_interval.SAVE_INTERVAL_FACTOR = 0
for event in perform(Plan.from_json(json.loads(sys.argv[2])), small_task("mlp/adamw/mean"), Path(sys.argv[1])):
    pass
"""


@pytest.mark.parametrize("link", ["local:4", "streaming:4:2"])
def test_saves_by_the_clock_are_at_the_end_of_a_round(tmp_path: Path, link: str) -> None:
    """Here at every opportunity: those of `streaming` end a round, and its next fragment is sent after that."""
    script = tmp_path / "clock.py"
    script.write_text(CLOCK)
    plan = replace(PLAN, link=link, batch=4, steps=19, checkpoint_every=None, restarts=1, keep=99)
    run_processes(script, [str(tmp_path), json.dumps(plan.to_json())], 2, tmp_path / "logs")
    saved = sorted(int(path.name[-8:]) for path in (tmp_path / "checkpoints").glob("step-????????"))
    # A request that goes out with one fragment is agreed on when the next is sent.
    assert saved == [4, 8, 12, 16, 19]
    assert len(Record.read(tmp_path).losses) == 19
