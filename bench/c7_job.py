"""C7: a whole job, from the command to the accuracy: SimpleNet on MNIST, 2 ranks x 64, 2 epochs, the test pictures.

python bench/c7_job.py [--quick] [--out FILE] [--data FOLDER]

FOLDER holds MNIST's four files, packed or not (as with torchvision, nobody unpacks inside the clock); without it, ten
noisy patterns in the same format. Every racer is a command of its own, by turns, and its time is that of the command
from start to end. One that does not reach the accuracy is not in the race. torchvision is not used: the per-sample
dataset does by hand what it does by way of PIL, in less time. The limit is the steps alone: as many as the job has, on
batches in memory, in two processes that send nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import harness
import peers
import torch
from harness import Entry, Result
from models import SIMPLE_NET

JOBS = Path(__file__).parent / "jobs"
sys.path.insert(0, str(JOBS))

from pictures import BATCH_A_RANK, RANKS, make, read, unpack  # noqa: E402

ACCURACY = 0.965
LONGEST_SECONDS = 300
FULL, QUICK = (60_000, 10_000), (6_400, 1_000, 2.0)
"""Pictures to train on and to test with, and how noisy they are."""
OURS, WRITTEN, ONE_THREAD, LIMIT = (
    "evenstep train",
    "tutorial, as written",
    "tutorial, one thread a rank",
    "the steps alone",
)
AGAIN = "tutorial, one thread a rank, again"


class Missed(Exception):
    """A job that did not do what it was to do."""


@dataclass
class Job:
    """A command, and the accuracy it says it reached."""

    command: list[str]
    threads: str | None = "1"
    accuracies: list[float] = field(default_factory=list)

    def seconds(self) -> float:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        if self.threads:
            environment["OMP_NUM_THREADS"] = self.threads
        with harness.in_scratch():
            started = time.perf_counter()
            done = subprocess.run(
                self.command, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS
            )
            seconds = time.perf_counter() - started
        if done.returncode:
            raise Missed(f"exit code {done.returncode}: {cause(done.stderr)}")
        self.accuracies.append(accuracy(done.stdout))
        if self.accuracies[-1] < ACCURACY:
            raise Missed(f"reached {self.accuracies[-1]:.2%} of the test pictures, not {ACCURACY:.1%}")
        return seconds


def cause(said: str) -> str:
    """The last line that names an error, or the last one: launchers end with reports of their own."""
    lines = [line.strip() for line in said.splitlines() if line.strip(" =-")] or ["not a word"]
    named = [line for line in lines if re.search(r"\w(Error|Exception)\b", line) and "ChildFailed" not in line]
    return [*lines[-1:], *named][-1][:200]


def accuracy(said: str) -> float:
    """From the last line: `accuracy 0.97`, or the summary that `evenstep train --json` ends with."""
    last = said.strip().splitlines()[-1] if said.strip() else ""
    if last.startswith("{"):
        return float(json.loads(last)["valid"]["accuracy"])
    word, _, value = last.partition(" ")
    if word != "accuracy":
        raise Missed(f"ended with {last!r}, and no accuracy")
    return float(value)


def jobs(folder: str, epochs: int) -> tuple[dict[str, Job], dict[str, str]]:
    """All who race, and who is not installed."""
    beside = Path(sys.executable).parent
    train = ["train", f"{JOBS / 'task.py'}:task", "--data", folder, "--devices", str(RANKS), "--epochs", str(epochs)]
    tutorial = [sys.executable, str(JOBS / "tutorial.py"), folder, str(epochs)]
    found = {
        OURS: Job([str(beside / "evenstep"), *train, "--json"], threads=None),
        ONE_THREAD: Job([*tutorial, "--one-thread"]),
        WRITTEN: Job(tutorial, threads=None),
    }
    absent = {}
    launched = [str(beside / "torchrun"), "--nproc-per-node", str(RANKS)]
    others = {
        "accelerate": ("accelerate", [*launched, str(JOBS / "with_accelerate.py"), folder, str(epochs)]),
        "Lightning": ("lightning", [sys.executable, str(JOBS / "with_lightning.py"), folder, str(epochs)]),
    }
    for name, (package, command) in others.items():
        if find_spec(package) is None:
            absent[name] = f"{package} is not installed here (make bench-setup)"
        else:
            found[name] = Job(command)
    return found, absent


def unless_absent(name: str, job: Job, absent: dict[str, str]) -> float:
    """Seconds of one more run; a racer that fails is out of the race, and the race goes on."""
    if name not in absent:
        try:
            return job.seconds()
        except (Missed, subprocess.TimeoutExpired) as error:
            if name == OURS:
                raise
            absent[name] = str(error)
    return math.nan


def steps_alone(num_steps: int) -> float:
    """Seconds of so many steps that send nothing, in two processes at once."""
    return max(harness.on_ranks(_steps_on_rank, num_steps))


def _steps_on_rank(num_steps: int) -> float:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    place = peers.Place(torch.distributed.get_rank(), RANKS)
    racer = peers.raw(SIMPLE_NET, place, True)
    racer.run(peers.NUM_COMPARED)
    seconds = harness.timed(racer.run, num_steps, True) * num_steps / 1e3
    torch.distributed.destroy_process_group()
    return seconds


ENTRIES = {
    OURS: Entry("ours"),
    WRITTEN: Entry("peer", "default", goal=10.0),
    ONE_THREAD: Entry("peer", "best", goal=2.0),
    AGAIN: Entry("control", against=ONE_THREAD),
    "accelerate": Entry("peer", "best", goal=2.0),
    "Lightning": Entry("peer", "best", goal=2.0),
    LIMIT: Entry("limit"),
}


def measure(folder: str, what: str, quick: bool) -> Result:
    epochs = 1 if quick else 2
    racing, absent = jobs(folder, epochs)
    if quick:
        # Most of so short a job is importing torch, in three processes each. As written it is slow by its threads: that
        # takes more pictures to show, and has no end on a busy machine.
        racing = {name: racing[name] for name in (OURS, ONE_THREAD)}
    firsts: dict[str, list[float]] = {}
    for name, job in racing.items():
        try:
            firsts[name] = [job.seconds()]
        except (Missed, subprocess.TimeoutExpired) as error:
            if name == OURS:
                raise
            absent[name] = str(error)
    num_train = len(read(folder, "train")[1])
    num_steps = epochs * math.ceil(num_train / (RANKS * BATCH_A_RANK))
    figures = firsts
    if not quick:
        blocks = {name: partial(unless_absent, name, job, absent) for name, job in racing.items() if name not in absent}
        blocks |= {LIMIT: partial(steps_alone, num_steps)}
        if ONE_THREAD not in absent:
            blocks[AGAIN] = partial(unless_absent, ONE_THREAD, racing[ONE_THREAD], absent)
        figures = harness.interleaved(blocks, 4)
        out = [*absent, AGAIN] if ONE_THREAD in absent else absent
        figures = {name: found for name, found in figures.items() if name not in out}
    title = f"SimpleNet on {what}, {num_train:,} pictures, 2 ranks x 64, {epochs} epoch{'s' * (epochs > 1)}"
    race = harness.judge(title, "s", ENTRIES, figures, absent=absent)
    reached = {name: min(job.accuracies) for name, job in racing.items() if job.accuracies}
    race.notes.append(
        "Accuracy, the least of all runs: " + ", ".join(f"{name} {one:.4f}" for name, one in reached.items())
    )
    keys = {"tutorial": WRITTEN, "tutorial_one_thread": ONE_THREAD, "steps_alone": LIMIT}
    headline = {f"ours_over_{key}": harness.ours_over(race, name) for key, name in keys.items() if name in figures}
    goal = "10 x the tutorial as written, 2 x with one thread a rank"
    return Result("C7", "a whole job, from command to 96.5 %", goal, [race], headline=headline)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", metavar="FOLDER", help="MNIST's four files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evenstep-pictures-") as made:
        if given.data:
            unpack(given.data, Path(made))
        else:
            make(Path(made), *(QUICK if given.quick else FULL))
        result = measure(made, "MNIST" if given.data else "made-up pictures", given.quick)
    harness.finish(result, given.out)


if __name__ == "__main__":
    main()
