"""A long run of a small task: memory of every process as the steps go by, and a restart near the end.

python bench/long_run.py [--steps 1000000] [--devices 2] [--out FILE]

Memory is the resident set of each rank and of the launcher; it is flat if the mean of the last tenth is at most 5 %
above that of the second tenth. (The first one warms up: torch's flight recorder keeps the last 2,000 collectives.) Then
rank 1 is killed; the restart is measured from its death to the first new step in the Record, and once more in a run of
500 steps, whose Record is short. The last line is what `evenstep report` took of the whole Record.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import psutil

from evenstep.record import FILE, Start, Step, end_of_rows, rows

STEPS = 1_000_000
SHORT = 500
KILL_AT = 0.97
"""Of the steps."""
MOST_GROWTH = 0.05
MOST_RESTART_SECONDS = 1.0
NUM_SAMPLES = 200
LONGEST_SECONDS = 4 * 3600
RUN = Path("runs/long")

TASK = """
import torch
from torch import nn
from evenstep import Task

x = torch.randn(160_000, 4, generator=torch.Generator().manual_seed(0))

def task():
    return Task(
        model=lambda: nn.Linear(4, 1),
        train=(x, x.sum(1, keepdim=True)),
        valid=(x[:64], x[:64].sum(1, keepdim=True)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=16,
    )
"""


@dataclass(frozen=True)
class Memory:
    """One look at all processes."""

    step: int
    mib: dict[str, float]


@dataclass(frozen=True)
class Report:
    """What writing the page of a run took."""

    seconds: float
    peak_mib: float


@dataclass(frozen=True)
class Long:
    """What one run showed."""

    steps: int
    devices: int
    seconds: float
    record_mib: float
    memory: list[Memory]
    growth: dict[str, float]
    """The mean of the last tenth over that of the second tenth, less 1."""
    restart_seconds: float
    restart_seconds_when_short: float
    report: Report

    @property
    def is_flat(self) -> bool:
        return max(self.growth.values()) <= MOST_GROWTH


class Watched:
    """A training in a process of its own, looked at from outside."""

    def __init__(self, steps: int, devices: int) -> None:
        self.steps = steps
        Path("small.py").write_text(TASK)
        options = ["--devices", str(devices), "--steps", str(steps), "--restarts", "1", "--name", RUN.name]
        self._launcher = psutil.Popen(
            [sys.executable, "-m", "evenstep", "train", "small.py", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def memory_until(self, step: int) -> list[Memory]:
        """Looks at about equal distances, up to that step."""
        found: list[Memory] = []
        while (now := last_step()) < step and self._launcher.is_running():
            if now >= (len(found) + 1) * self.steps / NUM_SAMPLES:
                found.append(Memory(now, {name: one.memory_info().rss / 2**20 for name, one in self._named()}))
            time.sleep(0.05)
        return found

    def restart_seconds(self) -> float:
        """Kill rank 1, and wait for the first step after it."""
        with (RUN / FILE).open("rb") as file:
            file.seek(end_of_rows(file))
            dict(self._named())["rank 1"].kill()
            killed = time.monotonic()
            has_begun = False
            while time.monotonic() < killed + 60:
                for row in rows(file):
                    has_begun = has_begun or isinstance(row, Start)
                    if has_begun and isinstance(row, Step):
                        return time.monotonic() - killed
                time.sleep(0.005)
        raise TimeoutError("no step came within 60 s after rank 1 was killed")

    def finish(self) -> None:
        if self._launcher.wait(LONGEST_SECONDS):
            raise RuntimeError(f"the run ended with exit code {self._launcher.returncode}; look at {RUN.resolve()}")

    def _named(self) -> list[tuple[str, psutil.Process]]:
        ranks = [one for one in self._launcher.children(recursive=True) if one.name().startswith("evenstep-rank")]
        named = [(one.name().replace("evenstep-rank", "rank "), one) for one in ranks]
        return [("launcher", self._launcher), *sorted(named, key=lambda pair: pair[0])]


def last_step() -> int:
    """Of the Record, read from its end."""
    if not (RUN / FILE).exists():
        return 0
    with (RUN / FILE).open("rb") as file:
        end = end_of_rows(file)
        file.seek(max(0, end - 4096))
        lines = file.read(min(end, 4096)).splitlines()[1:]
    found = [json.loads(line).get("step", 0) for line in lines]
    return max(found, default=0)


def growth(memory: Sequence[Memory], steps: int) -> dict[str, float]:
    def mean(name: str, begin: float, end: float) -> float:
        return statistics.mean(one.mib[name] for one in memory if begin * steps <= one.step < end * steps)

    last = memory[-1].step / steps
    return {name: mean(name, last - 0.1, 1) / mean(name, 0.1, 0.2) - 1 for name in memory[-1].mib}


def reported() -> Report:
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "evenstep", "report", str(RUN)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError("evenstep report failed")
    return Report(time.monotonic() - started, usage.ru_maxrss / 1024)


def run(steps: int, devices: int) -> Long:
    with harness.in_scratch():
        short = Watched(SHORT, devices)
        short.memory_until(SHORT // 2)
        when_short = short.restart_seconds()
        short.finish()
    with harness.in_scratch():
        started = time.monotonic()
        long = Watched(steps, devices)
        memory = long.memory_until(int(KILL_AT * steps))
        seconds = long.restart_seconds()
        long.finish()
        took = time.monotonic() - started
        size = (RUN / FILE).stat().st_size / 2**20
        return Long(steps, devices, took, size, memory, growth(memory, steps), seconds, when_short, reported())


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--devices", type=int, default=2)
    chosen = parser.parse_args()
    found = run(min(chosen.steps, 20_000) if chosen.quick else chosen.steps, chosen.devices)
    cells = [
        [name, f"{found.memory[0].mib[name]:.1f}", f"{found.memory[-1].mib[name]:.1f}", f"{more:+.1%}"]
        for name, more in found.growth.items()
    ]
    harness.show(f"{found.steps:,} steps, Record {found.record_mib:.0f} MiB", ["MiB", "first", "last", "growth"], cells)
    print(
        f"restart {found.restart_seconds:.2f} s; in a run of {SHORT:,} steps {found.restart_seconds_when_short:.2f} s"
    )
    print(f"evenstep report: {found.report.seconds:.1f} s, {found.report.peak_mib:.0f} MiB")
    is_met = found.is_flat and found.restart_seconds < MOST_RESTART_SECONDS
    goal = f"flat within {MOST_GROWTH:.0%}, restart under {MOST_RESTART_SECONDS:.0f} s"
    print(f"goal ({goal}): {'met' if is_met else 'missed'}")
    if chosen.out:
        command = shlex.join(["python", "bench/long_run.py", *sys.argv[1:]])
        harness.write(chosen.out, command, {**asdict(found), "is_met": is_met})


if __name__ == "__main__":
    main()
