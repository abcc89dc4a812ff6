"""N2: time to the same loss at 100 Mbit, two hosts with two ranks each.

Every method trains the same network. DDP, local and diloco have the learning rate, of a small grid, with which they
ended best (links_rates.py; its seeds 0 and 1 are among those here); PowerSGD has DDP's, and post-local SGD has local's:
their own were not searched. The loss is that of the validation set, with the weights that all ranks share:
losses of local steps are those of ranks that have drifted apart, whose weights nobody keeps. Seconds are of steps;
evaluations do not count. The target is 1 % above what DDP ends with.

Two works. `teacher`: labels are drawn from the probabilities of a random network, so that after a hundred steps noise
decides. `text`: the next character of Python's own library; the loss still falls fast when the run ends, and rounds
must be shorter.
"""

from __future__ import annotations

import math
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import harness
import torch
import torch.distributed as dist
from links_hosts import on_hosts
from tests.faults.hosts import hosts
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from evenstep import Plan, Task
from evenstep.compare.compare_links import STUDENT
from evenstep.record import Record

BATCH, WARM_UP = 256, 30
NUM_VALID = 4000
CONTEXT, SYMBOLS = 12, 128
WITHIN = 1.01
DDP = "torch's DDP"


@dataclass(frozen=True)
class Method:
    """How one of them trains."""

    rate: float
    link: str | None = None
    """Of evenstep; None: torch by hand."""
    every: int = 0
    """Steps between averages of torch's post-local SGD; 0: torch's PowerSGD."""


@dataclass(frozen=True)
class Trained:
    """A network, its data, and the methods that train it."""

    model: Callable[[], nn.Module]
    columns: Callable[[], tuple[Tensor, Tensor]]
    methods: dict[str, Method]
    evaluate_every: int
    """A multiple of the steps of a round, which an evaluation ends."""


class NextCharacter(nn.Module):
    """From the characters before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(SYMBOLS, 16), nn.Linear(16 * CONTEXT, 256)
        self.out = nn.Linear(256, SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        found: Tensor = self.out(F.relu(self.hidden(self.embedding(symbols.long()).flatten(1))))
        return found


@cache
def taught() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    teacher = [torch.randn(shape, generator=generator) / 4 for shape in ((64, 64), (64, 10))]
    x = torch.randn(160_000 + NUM_VALID, 64, generator=generator)
    chances = torch.softmax(torch.tanh(x @ teacher[0]) @ teacher[1], 1)
    return x, torch.multinomial(chances, 1, generator=generator)[:, 0]


@cache
def written() -> tuple[Tensor, Tensor]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:2_000_000]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=SYMBOLS - 1).unfold(0, CONTEXT + 1, 1)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    return windows[:, :-1].contiguous(), windows[:, -1].long()


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def methods(exact: float, local: float, diloco: float, every: int) -> dict[str, Method]:
    """With the rates of those that average gradients, of those that average weights, and of diloco."""
    return {
        DDP: Method(exact, "none"),
        "torch's PowerSGD, rank 2": Method(exact),
        f"torch's post-local SGD, {every} steps": Method(local, every=every),
        "--link powersgd:2": Method(exact, "powersgd:2"),
        f"--link local:{every}": Method(local, f"local:{every}"),
        f"--link diloco:{every}": Method(diloco, f"diloco:{every}"),
    }


TRAINED = {
    "teacher": Trained(three_layers, taught, methods(4e-3, 4e-3, 2e-3, 50), 50),
    "text": Trained(NextCharacter, written, methods(2e-2, 2e-2, 5e-3, 10), 50),
}


def loss(model: Callable[[Any], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def falling(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """A warm-up, and half a cosine."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 0.5 * (1 + math.cos(math.pi * step / num_steps))))


@dataclass(frozen=True)
class Curve:
    """Of one training: seconds of steps until each evaluation, and what it found."""

    seconds: list[float]
    losses: list[float]

    def seconds_to(self, target: float) -> float | None:
        return next((at for at, loss in zip(self.seconds, self.losses, strict=True) if loss <= target), None)


def train_all(spec: dict[str, Any]) -> dict[str, Any] | None:
    """One rank: every method with every seed, in turn."""
    import evenstep

    world = evenstep.join("ddp", ["cpu", "cpu"]).world
    trained = TRAINED[spec["task"]]
    found: dict[str, list[list[list[float]]]] = {name: [] for name in trained.methods}
    for seed in range(spec["seeds"]):
        for name in list(trained.methods)[:: 1 if seed % 2 == 0 else -1]:
            method = trained.methods[name]
            folder = Path(spec["folder"]) / f"{name}-{seed}".replace(" ", "-").replace(":", "-")
            dist.barrier()
            if method.link is not None:
                curve = _by_evenstep(trained, method, plan_of(spec, seed, method.link), folder)
            else:
                curve = _by_torch(trained, method, spec["steps"], seed)
            found[name].append([curve.seconds, curve.losses])
    return found if world.is_main else None


def plan_of(spec: dict[str, Any], seed: int, link: str) -> Plan:
    return Plan(
        strategy="ddp",
        devices=("cpu", "cpu"),
        batch=BATCH,
        steps=spec["steps"],
        seed=seed,
        threads=1,
        link=link,
        evaluate_every=TRAINED[spec["task"]].evaluate_every,
    )


def _by_evenstep(trained: Trained, method: Method, plan: Plan, folder: Path) -> Curve:
    from evenstep.training.trainer import perform

    x, y = trained.columns()
    task = Task(
        model=trained.model,
        train=(x[NUM_VALID:], y[NUM_VALID:]),
        valid=(x[:NUM_VALID], y[:NUM_VALID]),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=method.rate),
        scheduler=falling,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for _ in perform(plan, task, folder):
        pass
    if dist.get_rank() != 0:
        return Curve([], [])
    record = Record.read(folder)
    seconds = [sum(step.seconds for step in record.steps if step.step <= one.step) for one in record.evaluations]
    return Curve(seconds, [one.values["loss"] for one in record.evaluations])


def _by_torch(trained: Trained, method: Method, num_steps: int, seed: int) -> Curve:
    """As torch's documentation has it; the order of samples is another, and so are the first weights."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(trained.model())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=method.rate)
    schedule = falling(optimizer, num_steps)
    if method.every:
        # It counts steps from 0: so it averages after 25, 50, ... of them.
        warm_up = method.every * round(WARM_UP / method.every) - 1
        inside, _ = dist.new_subgroups(group_size=2)
        state = post_localSGD_hook.PostLocalSGDState(None, inside, warm_up)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(method.every, warm_up))
    else:
        power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
    x, y = trained.columns()
    taken, seconds, losses = 0.0, [], []
    for number, batch in enumerate(_shares(x, y, seed, num_steps), 1):
        began = time.perf_counter()
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        taken += time.perf_counter() - began
        if number % trained.evaluate_every == 0:
            with torch.no_grad():
                losses.append(loss(model.module, (x[:NUM_VALID], y[:NUM_VALID])).item())
            seconds.append(taken)
            dist.barrier()
    return Curve(seconds, losses)


def _shares(x: Tensor, y: Tensor, seed: int, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of every batch."""
    generator = torch.Generator().manual_seed(seed)
    order = NUM_VALID + torch.randperm(len(x) - NUM_VALID, generator=generator)
    size = BATCH // dist.get_world_size()
    for number in range(num_steps):
        start = number * BATCH + dist.get_rank() * size
        part = order[start : start + size]
        yield x[part], y[part]


def n2(is_quick: bool, task: str = "teacher") -> dict[str, Any]:
    shape = {"seeds": 2, "steps": 100} if is_quick else {"seeds": 5, "steps": 450}
    with tempfile.TemporaryDirectory() as folder, hosts(2) as machines:
        for machine in machines:
            machine.cap(100)
        spec = {"work": "trainings", "task": task, "folder": str(Path(folder) / "runs"), **shape}
        found = on_hosts(machines, spec, Path(folder))
    curves = {name: [Curve(*one) for one in of_name] for name, of_name in found.items()}
    results = {"task": task, **shape, **judged(curves, shape["steps"]), "curves": found}
    heads = [f"{task}, 100 Mbit", "seconds to target", "x DDP (95 %)", "s a step", "final loss", "from DDP's"]
    harness.show("", heads, [_cells(name, row) for name, row in results["rows"].items()])
    return results


def n2_text(is_quick: bool) -> dict[str, Any]:
    return n2(is_quick, "text")


def judged(curves: dict[str, list[Curve]], num_steps: int) -> dict[str, Any]:
    """Each seed beside DDP with the same seed; its own target is 1 % above what DDP ended with."""
    targets = [WITHIN * curve.losses[-1] for curve in curves[DDP]]
    reached = {
        name: [curve.seconds_to(target) for curve, target in zip(of_name, targets, strict=True)]
        for name, of_name in curves.items()
    }
    rows = {}
    for name, of_name in curves.items():
        apart = [one.losses[-1] / ddp.losses[-1] - 1 for one, ddp in zip(of_name, curves[DDP], strict=True)]
        rows[name] = {
            "seconds_to_target": reached[name],
            "gain": _gain(reached[DDP], reached[name]),
            "step_seconds": median(one.seconds[-1] / num_steps for one in of_name),
            "final_loss": [one.losses[-1] for one in of_name],
            "from_ddps": apart,
        }
    return {"targets": targets, "rows": rows}


def _gain(first: Sequence[float | None], own: Sequence[float | None]) -> list[float] | None:
    """Mean of pairs and its 95 % interval; None where a seed never reached the target."""
    if None in own:
        return None
    logs = [math.log(one / other) for one, other in zip(first, own, strict=True) if one and other]
    middle, half = fmean(logs), STUDENT[len(logs) - 2] * stdev(logs) / math.sqrt(len(logs))
    return [math.exp(middle), math.exp(middle - half), math.exp(middle + half)]


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    there = [one for one in row["seconds_to_target"] if one is not None]
    never = len(row["seconds_to_target"]) - len(there)
    apart = row["from_ddps"]
    return [
        name,
        (f"{median(there):.3g}" if there else "") + (f" ({never} never)" if never else ""),
        "{:.2f} ({:.2f} to {:.2f})".format(*row["gain"]) if row["gain"] else "-",
        f"{row['step_seconds']:.4f}",
        f"{fmean(row['final_loss']):.4f}",
        f"{fmean(apart):+.2%} ({min(apart):+.2%} to {max(apart):+.2%})",
    ]
