"""C6: how long from the command to the first step, and from a killed rank to the next step: evenstep and torchrun.

python bench/c6_start.py [--quick] [--out FILE]      on the CPU, one thread a process

1. From right before the command is started to the end of the first optimizer step of the last rank, for 2 and 4 ranks.
2. From the SIGKILL of rank 1, at its step 5, to the end of its first step after the one restart that is allowed; rank 0
   saves after every step.

The ranks take the times themselves, in the optimizer. All racers train the same network on the same batches, and what
they learned is compared first; a racer is judged by what its ranks left, not by how it ended. "torchrun again" is the
control: no claim smaller than its spread. "by hand" is the limit: so many Pythons that import torch, join and add up
one number, with nobody to watch them.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import harness
import psutil
from harness import Entry, Race, Result

ROUNDS = 6
RANKS = (2, 4)
START_STEPS = 3
RECOVERY_STEPS = 10
LONGEST_SECONDS = 60
GOAL = 2.0
"""Times as fast as torchrun, at least."""
CONTROL = "torchrun again"

SHARED = f"""
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F

BATCH, NUM_STEPS = 240, {RECOVERY_STEPS}
KILLED = Path("killed")
generator = torch.Generator().manual_seed(0)
x = torch.randn(BATCH * NUM_STEPS, 20, generator=generator)
y = torch.randint(0, 5, (len(x),), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


class TimedSGD(torch.optim.SGD):
    '''Leaves the time after its first step, and what it has learned; if asked to, kills rank 1 at step 5, once.'''

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.taken = 0
        self.life = "second" if KILLED.exists() else "first"

    def step(self, closure=None):
        super().step(closure)
        now = time.time()
        self.taken += 1
        rank = os.environ["RANK"]
        if self.taken == 1:
            Path(f"{{self.life}}.{{rank}}").write_text(repr(now))
        learned = sum(one.detach().double().abs().sum().item() for one in self.param_groups[0]["params"])
        Path(f"learned.{{rank}}").write_text(repr(learned))
        if "KILL" in os.environ and self.life == "first" and rank == "1" and self.taken == 5:
            KILLED.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
"""

TASK = """
from torch.utils.data import SequentialSampler
from evenstep import Task

def task() -> Task:
    return Task(
        model=network,
        train=(x, y),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=TimedSGD,
        sampler=SequentialSampler(x),
        batch=BATCH,
    )
"""

SCRIPT = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = network()
    optimizer = TimedSGD(model.parameters())
    first = 0
    if Path("saved.pt").exists():
        saved = torch.load("saved.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    ddp = DistributedDataParallel(model)
    for step in range(first, int(sys.argv[1])):
        mine = slice(step * BATCH + rank * BATCH // size, step * BATCH + (rank + 1) * BATCH // size)
        optimizer.zero_grad()
        F.cross_entropy(ddp(x[mine]), y[mine]).backward()
        optimizer.step()
        if rank == 0 and "KILL" in os.environ:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(states, "saving.pt")
            os.replace("saving.pt", "saved.pt")
    dist.destroy_process_group()

main()
"""

ACCELERATED = """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

def main():
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH // accelerator.num_processes)
    model = network()
    model, optimizer, loader = accelerator.prepare(model, TimedSGD(model.parameters()), loader)
    for step, (inputs, labels) in enumerate(loader):
        if step == int(sys.argv[1]):
            break
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
    accelerator.end_training()

main()
"""

JOINING = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
Path("first." + os.environ["RANK"]).write_text(repr(time.time()))
dist.destroy_process_group()
"""

IMPORTING = """
import time
from pathlib import Path
import torch

Path("first.0").write_text(repr(time.time()))
"""

FILES = {
    "task.py": SHARED + TASK,
    "script.py": SHARED + SCRIPT,
    "accelerated.py": SHARED + ACCELERATED,
    "joining.py": JOINING,
    "importing.py": IMPORTING,
}

Command = list[str]


class NotThere(Exception):
    """A racer that does not run, and why."""


@dataclass(frozen=True)
class Racer:
    """A command, or several started together, each with its own environment."""

    commands: list[Command]
    environments: list[dict[str, str]]
    num_ranks: int
    is_trained: bool = True

    def run(self, more: Mapping[str, str]) -> tuple[float, float | None]:
        """Seconds to the end of the first step of the last rank, or from the death of rank 1 to its next step; and the
        sum of all weights after the run, where something is trained."""
        with tempfile.TemporaryDirectory(prefix="evenstep-bench-") as name:
            folder = Path(name)
            for file, text in FILES.items():
                (folder / file).write_text(text)
            started = time.time()
            self._finish(folder, more)
            try:
                return self._seconds(folder, started, more), _number(folder / "learned.0") if self.is_trained else None
            except FileNotFoundError as error:
                said = (folder / "said").read_text(errors="replace").strip().splitlines()
                last = next((line for line in reversed(said) if "rror" in line), "not a word")
                raise NotThere(f"{last} (left no {Path(error.filename).name})") from error

    def _seconds(self, folder: Path, started: float, more: Mapping[str, str]) -> float:
        if "KILL" in more:
            return _number(folder / "second.1") - _number(folder / "killed")
        return max(_number(folder / f"first.{rank}") for rank in range(self.num_ranks)) - started

    def _finish(self, folder: Path, more: Mapping[str, str]) -> None:
        with (folder / "said").open("w") as said:
            processes = [
                psutil.Popen(
                    command,
                    cwd=folder,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **environment, **more},
                    stdout=said,
                    stderr=said,
                )
                for command, environment in zip(self.commands, self.environments, strict=True)
            ]
            _, late = psutil.wait_procs(processes, LONGEST_SECONDS)
            # torchrun's workers live in sessions of their own and outlive it.
            for process in [child for one in late for child in one.children(recursive=True)] + late:
                process.kill()
            psutil.wait_procs(late)


def _number(file: Path) -> float:
    return float(file.read_text())


def one(num_ranks: int, *command: str, **environment: str) -> Racer:
    return Racer([[_program(command[0]), *command[1:]]], [environment], num_ranks)


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def by_hand(num_ranks: int, script: str) -> Racer:
    """As many Pythons as ranks, started one after the other."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    return Racer([[sys.executable, script]] * num_ranks, environments, num_ranks, is_trained=False)


def starting(num_ranks: int) -> dict[str, Racer]:
    num, steps = str(num_ranks), str(START_STEPS)
    torchrun = one(num_ranks, "torchrun", "--nproc-per-node", num, "script.py", steps)
    racers = {
        "torchrun": torchrun,
        CONTROL: torchrun,
        "evenstep run": one(num_ranks, "evenstep", "run", "--devices", num, "script.py", steps),
        "evenstep train": one(num_ranks, "evenstep", "train", "task.py", "--devices", num, "--steps", steps),
        "import torch, join by hand": by_hand(num_ranks, "joining.py"),
        "import torch, one process": by_hand(1, "importing.py"),
    }
    if find_spec("accelerate"):
        # `accelerate launch --cpu` starts one process; accelerate's own way to several on a CPU is torchrun (or MPI).
        racers["accelerate, by torchrun"] = one(num_ranks, "torchrun", "--nproc-per-node", num, "accelerated.py", steps)
    return racers


def recovering(num_ranks: int) -> dict[str, Racer]:
    num, steps = str(num_ranks), str(RECOVERY_STEPS)
    once = ("--standalone", "--nproc-per-node", num, "--max-restarts", "1")
    # Without it, gloo reads the addresses of the dead from the store of the first life, and mostly fails or hangs
    # (pytorch/pytorch#135712).
    torchrun = one(num_ranks, "torchrun", *once, "script.py", steps, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    restarts = ("--devices", num, "--restarts", "1")
    train = ("evenstep", "train", "task.py", "--steps", steps, "--checkpoint-every", "1")
    return {
        "torchrun": torchrun,
        CONTROL: torchrun,
        "evenstep run": one(num_ranks, "evenstep", "run", *restarts, "script.py", steps),
        "evenstep train": one(num_ranks, *train, *restarts),
    }


Firsts = dict[str, float]
"""Seconds of the run in which a racer showed what it learns."""


def able(racers: Mapping[str, Racer], more: Mapping[str, str]) -> tuple[Firsts, dict[str, str]]:
    """Those that run and learn what torchrun's script learns, after one run; and why not the rest."""
    firsts, absent = {}, {}
    firsts["torchrun"], expected = racers["torchrun"].run(more)
    assert expected is not None
    for name, racer in racers.items():
        if name in ("torchrun", CONTROL):
            continue
        try:
            firsts[name], learned = racer.run(more)
        except NotThere as error:
            absent[name] = f"not there yet: {error}"
        else:
            if learned is not None and abs(learned - expected) > 1e-3:
                absent[name] = f"learned something else: {learned:.4f}, not {expected:.4f}"
    return {name: seconds for name, seconds in firsts.items() if name not in absent}, absent


RUN, TRAIN = "evenstep run", "evenstep train"
ENTRIES = {
    RUN: Entry("ours"),
    TRAIN: Entry("ours", goal=GOAL, against="torchrun"),
    "torchrun": Entry("peer", goal=GOAL),
    CONTROL: Entry("control", against="torchrun"),
    "accelerate, by torchrun": Entry("peer", goal=GOAL),
    "import torch, join by hand": Entry("limit"),
    "import torch, one process": Entry("limit"),
}
"""`evenstep run` runs the very script that torchrun runs, so it is the one that others are compared with."""


KILL = {"KILL": "1"}


def race(title: str, racers: Mapping[str, Racer], more: Mapping[str, str], rounds: int) -> Race:
    """All racers by turns; with no rounds, the runs in which learning is compared are all there is."""
    firsts, absent = able(racers, more)
    figures: dict[str, list[float]] = {name: [seconds] for name, seconds in firsts.items()}
    if rounds:
        running = {name: racer for name, racer in racers.items() if name not in absent}
        blocks = {name: partial(_seconds, racer, more) for name, racer in running.items()}
        figures = harness.interleaved(blocks, rounds)
    return harness.judge(title, "s", ENTRIES, figures, absent=absent)


def _seconds(racer: Racer, more: Mapping[str, str]) -> float:
    return racer.run(more)[0]


def _few(racers: dict[str, Racer], quick: bool) -> dict[str, Racer]:
    """Every racer imports torch in each of its processes, and that is what quick has to save."""
    return {name: racers[name] for name in ("torchrun", RUN, TRAIN)} if quick else racers


def measure(quick: bool) -> Result:
    rounds = 0 if quick else ROUNDS
    ranks = RANKS[:1] if quick else RANKS
    races = [
        race(f"command to the end of the first step, {num} ranks", _few(starting(num), quick), {}, rounds)
        for num in ranks
    ]
    killed = f"SIGKILL of rank 1 to the end of its next step, {RANKS[0]} ranks"
    if not quick:
        races.append(race(killed, recovering(RANKS[0]), KILL, rounds))
    start = races[0]
    headline = {
        "run_over_torchrun": harness.ours_over(start, "torchrun"),
        "train_over_torchrun": next((1 / row.ratio for row in start.rows if row.name == TRAIN and row.ratio), math.nan),
    }
    if not quick:
        headline["run_over_import_and_join"] = harness.ours_over(start, "import torch, join by hand")
    goal = "half of torchrun's time"
    return Result("C6", "command to first step, and from kill -9 to the next", goal, races, headline=headline)


def main() -> None:
    given = harness.parser(__doc__).parse_args()
    harness.finish(measure(given.quick), given.out)


if __name__ == "__main__":
    main()
