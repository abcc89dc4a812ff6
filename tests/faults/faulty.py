"""A small task with something wrong in it: `FAULT=kind:rank:step` says what happens, to whom, and when.

With `FAULT_ONCE` it happens once, however often the run is started again. Tests copy this file beside their runs.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from evenstep import Task
from evenstep.distributed.heartbeat import SAVING
from evenstep.distributed.worker_process import worker_spec
from evenstep.distributed.world import read_heartbeat
from evenstep.worker.main import TrainingSpec

HAPPENED = Path("happened")
CHECKPOINTS = Path("runs/one/checkpoints")
NUM_SAMPLES = int(os.environ.get("SAMPLES", "62"))
WIDTH = int(os.environ.get("WIDTH", "16"))
PACE = float(os.environ.get("PACE", "0"))
RANK_PACE = float(os.environ.get("RANK_PACE", "0")) if isinstance(worker_spec(), TrainingSpec) else 0.0
"""The same, not for what the command itself computes before it starts ranks."""

x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()
heartbeat = read_heartbeat()


# The task.


def of_tensors() -> Task:
    """What most faults happen to."""
    return Task(
        model=model,
        train=(x, y),
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        batch=6,
        epochs=2,
    )


def of_tuned(lr: float = 0.01) -> Task:
    """With something to search, and a metric."""
    return replace(of_tensors(), valid=(x, y))


def of_samples() -> Task:
    """Data that is read one by one: by loader workers, if there are any."""
    return replace(of_tensors(), train=Samples())


def of_elsewhere() -> Task:
    """Works in another folder, where its data may be."""
    os.chdir("elsewhere")
    return of_samples()


def of_statistics() -> Task:
    """A model whose buffers are sent before every step."""
    return replace(of_samples(), model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))


def of_gradients() -> Task:
    """Weights that are, after one step, the first ones less their gradients."""
    return replace(
        of_tensors(), model=lambda: nn.Linear(4, 2), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    )


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, id_: int) -> tuple[Tensor, Tensor]:
        happen("while reading")
        return x[id_] + 0.1 * torch.randn(4), y[id_]


class Head(nn.Linear):
    """A last layer that has more to save than its weights."""

    def get_extra_state(self) -> Tensor:
        if heartbeat.read().phase == SAVING:
            happen("while saving")
        return torch.zeros(1)

    def set_extra_state(self, state: Tensor) -> None:
        pass


def model() -> nn.Module:
    if isinstance(worker_spec(), TrainingSpec):
        happen("while building")
    made = nn.Sequential(nn.Linear(4, WIDTH), nn.Dropout(0.2), Head(WIDTH, 2))
    return made.double() if is_due("double weights") else made


def loss(model: nn.Module, batch: Any) -> Tensor:
    time.sleep(PACE + RANK_PACE)
    happen("in a step")
    inputs, labels = batch
    weight = next(model.parameters())
    value = F.cross_entropy(model(inputs.to(weight.dtype)), labels)
    if is_due("nan loss"):
        return value * float("nan")
    if is_due("nan gradient"):
        # Adds nothing to the loss, and 0 * infinity to its gradient.
        return value + (0 * next(model.parameters()).sum()).sqrt()
    return value


# What goes wrong with it.


def happen(when: str) -> None:
    """Do what the environment says, if this is the rank, the step and the moment for it."""
    kind = os.environ.get("FAULT", "").partition(":")[0]
    if kind in FAULTS and FAULTS[kind][0] == when and (is_due(kind) or kind in AT_EVERY_STEP):
        FAULTS[kind][1]()


def is_due(kind: str) -> bool:
    """Whether the fault is this one, and here, and now; if it is to happen once, not again."""
    wanted, rank, step = os.environ.get("FAULT", "none:0:0").split(":")
    if wanted != kind or rank != os.environ.get("RANK", "0") or not is_at(int(step)):
        return False
    if "FAULT_ONCE" in os.environ and HAPPENED.exists():
        return False
    HAPPENED.touch()
    return True


def is_at(step: int) -> bool:
    """Whether this rank is at this step; a loader worker reads ahead, and may not read anything during one step."""
    now = heartbeat.read().step
    return now == step if torch.utils.data.get_worker_info() is None else now >= step


def send(pid: int, number: int) -> None:
    os.kill(pid, number)


def launcher() -> int:
    """Our parent is the fork server, and its parent is the launcher."""
    return psutil.Process(os.getppid()).ppid()


def rank_0() -> int:
    others = psutil.Process(os.getppid()).children()
    return next(process.pid for process in others if process.name() == "evenstep-rank0")


def tracker() -> int:
    """Python's tracker of semaphores, which the launcher started."""
    others = psutil.Process(launcher()).children()
    return next(process.pid for process in others if "resource_tracker" in " ".join(process.cmdline()))


def kill_the_tracker_and_this_rank() -> None:
    send(tracker(), signal.SIGKILL)
    send(os.getpid(), signal.SIGKILL)


def go_elsewhere_and_stop() -> None:
    os.chdir("/")
    next(iter(()))


def raise_it() -> None:
    raise ValueError("the sky is falling")


def touch_nothing() -> None:
    ctypes.string_at(0)


def hold_the_interpreter() -> None:
    # PyDLL, unlike CDLL, does not let go of the interpreter's lock.
    ctypes.PyDLL(None).sleep(1000)


def let_rank_0_wait_and_terminate_it() -> None:
    time.sleep(0.5)
    send(rank_0(), signal.SIGTERM)
    time.sleep(0.5)


def terminate_twice() -> None:
    send(launcher(), signal.SIGTERM)
    time.sleep(0.1)
    send(launcher(), signal.SIGTERM)


def interrupt_while_writing() -> None:
    """Ctrl-C, twice, when half of a checkpoint is on the disk."""
    flush = os.fsync

    def flush_slowly(descriptor: int) -> None:
        send(launcher(), signal.SIGINT)
        time.sleep(0.3)
        flush(descriptor)

    os.fsync = flush_slowly


def damage(how: Callable[[Path], None]) -> Callable[[], None]:
    def damage_and_die() -> None:
        how(CHECKPOINTS / os.readlink(CHECKPOINTS / "latest"))
        send(os.getpid(), signal.SIGKILL)

    return damage_and_die


def flip_a_byte(checkpoint: Path) -> None:
    file = checkpoint / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "optimizer.safetensors", 20)


def delete(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def fill_the_disk() -> None:
    """To the last byte: half of what does not fit is tried, down to one byte."""
    size = 2**20
    with Path("runs/filler").open("wb", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def limit_memory() -> None:
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
    torch.ones(2**28)


def overrun_the_group() -> None:
    """Into a control group of little memory, where the launcher sees us, and then more than it allows."""
    (Path(os.environ["GROUP"]) / "cgroup.procs").write_text(str(os.getpid()))
    time.sleep(1.5)
    torch.ones(2**28)


def die_at_the_next_point() -> None:
    """Die in every save, each time one call of the system further on; a save with fewer calls is left alone."""
    progress = Path("points")
    point, last_step = map(int, progress.read_text().split()) if progress.exists() else (1, 0)
    step = heartbeat.read().step
    if os.environ["RANK"] != "0" or step <= last_step:
        return
    calls = 0

    def count(event: str, arguments: object) -> None:
        nonlocal calls
        # A hook cannot be removed: those of earlier saves, which were left alone, would count in this one.
        now = heartbeat.read()
        if (now.phase, now.step) == (SAVING, step) and event.partition(".")[0] in ("open", "os", "shutil"):
            calls += 1
            if calls == point:
                descriptor = os.open("points.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.write(descriptor, f"{point + 1} {step}".encode())
                os.rename("points.new", "points")
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def add_up(at_fault: Callable[[], object]) -> Callable[[], None]:
    """A collective of the user's own, at every step; one rank does something else at one of them."""

    def add_up_here() -> None:
        if is_due(os.environ["FAULT"].partition(":")[0]):
            at_fault()
        elif dist.is_initialized():
            dist.all_reduce(torch.ones(3))

    return add_up_here


FAULTS: dict[str, tuple[str, Callable[[], object]]] = {
    "raise at the start": ("while building", raise_it),
    "raise": ("in a step", raise_it),
    "leave": ("in a step", lambda: os._exit(0)),
    "go elsewhere and stop": ("in a step", go_elsewhere_and_stop),
    "kill": ("in a step", lambda: send(os.getpid(), signal.SIGKILL)),
    "kill the server": ("in a step", lambda: send(os.getppid(), signal.SIGKILL)),
    "kill the tracker": ("in a step", lambda: send(tracker(), signal.SIGKILL)),
    "kill the tracker and a rank": ("in a step", kill_the_tracker_and_this_rank),
    "segv": ("in a step", touch_nothing),
    "stop": ("in a step", lambda: send(os.getpid(), signal.SIGSTOP)),
    "hold": ("in a step", hold_the_interpreter),
    "never read": ("while reading", lambda: time.sleep(1000)),
    "term": ("in a step", lambda: send(launcher(), signal.SIGTERM)),
    "term in all-reduce": ("in a step", let_rank_0_wait_and_terminate_it),
    "term twice": ("in a step", terminate_twice),
    "int in save": ("while saving", interrupt_while_writing),
    "flip": ("in a step", damage(flip_a_byte)),
    "truncate": ("in a step", damage(truncate)),
    "delete": ("in a step", damage(delete)),
    "delete the run": ("in a step", lambda: shutil.rmtree("runs/one")),
    "delete the checkpoints": ("in a step", lambda: shutil.rmtree(CHECKPOINTS)),
    "fill": ("in a step", fill_the_disk),
    "limit files": ("in a step", limit_files),
    "limit memory": ("in a step", limit_memory),
    "overrun": ("in a step", overrun_the_group),
    "raise in save": ("while saving", raise_it),
    "die in save": ("while saving", die_at_the_next_point),
    "skip": ("in a step", add_up(lambda: None)),
    "other op": ("in a step", add_up(lambda: dist.broadcast(torch.ones(3), 1))),
    "other shape": ("in a step", add_up(lambda: dist.all_reduce(torch.ones(5)))),
    "other dtype": ("in a step", add_up(lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32)))),
}
AT_EVERY_STEP = ("die in save", "skip", "other op", "other shape", "other dtype")
