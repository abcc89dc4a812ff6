"""Processes of running trainings, killed at random: nothing may be lost or done twice, and the weights are the same.

python -m tests.faults.kills --kills 250

Each training suffers kills of one kind, and of all kinds in turn. What the launcher cannot restart (it was killed
itself, or gave up) is gone on from with --resume, as a user would.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from evenstep.checkpoint import files, integrity
from tests.faults.runs import TASK, audit, nothing_is_left, saved_step, weights

STEPS = 60
ENVIRONMENT = {"SAMPLES": "120", "PACE": "0.03"}
OPTIONS = ("--devices", "2", "--workers", "1", "--steps", str(STEPS), "--checkpoint-every", "4", "--audit")
LEAST_PATIENCE_SECONDS = 3.0
PATIENCE = 0.5
"""The longest that is waited between a process's being there and its end, of the time of an undisturbed training: where
a start takes long, kills must not all come before the first step, as the launcher waits longer before each restart."""
LONGEST_SECONDS = 300
"""For a training that nobody disturbs any more."""


def ranks(launcher: psutil.Process) -> list[psutil.Process]:
    return [one for one in launcher.children(recursive=True) if one.name().startswith("evenstep-rank")]


def readers(launcher: psutil.Process) -> list[psutil.Process]:
    return [one for one in launcher.children(recursive=True) if one.name() == "evenstep-reader"]


def called(word: str) -> Callable[[psutil.Process], list[psutil.Process]]:
    """Direct children of the launcher: copies of the fork server are called as it is."""
    return lambda launcher: [one for one in launcher.children() if word in " ".join(one.cmdline())]


KINDS: dict[str, Callable[[psutil.Process], list[psutil.Process]]] = {
    "rank": ranks,
    "launcher": lambda launcher: [launcher],
    "fork server": called("forkserver"),
    "tracker": called("resource_tracker"),
    "loader worker": readers,
}
ANY = "any of them"


@dataclass
class Count:
    """What became of the kills of one kind."""

    killed: int = 0
    restarted: int = 0
    lost: int = 0
    repeated: int = 0
    trainings: int = 0
    bit_equal: int = 0
    tracebacks: int = 0

    @property
    def is_well(self) -> bool:
        return not (self.lost or self.repeated or self.tracebacks) and self.bit_equal == self.trainings


@dataclass
class Training:
    """One training, over as many launchers as it takes."""

    number: int
    draws: random.Random
    patience_seconds: float
    names: list[str] = field(default_factory=list)
    """The runs that are its chain, the first one first."""
    starts: int = 0

    def suffer(self, kind: str, kills: int, count: Count) -> int:
        """Train to the end, with up to so many kills on the way; how many there were."""
        done = 0
        while True:
            process, said = self._start()
            while done < kills and process.poll() is None:
                done += self._kill(kind, process)
            process.wait(LONGEST_SECONDS)
            nothing_is_left(seconds=30)
            text = said.read_text()
            count.restarted += len(re.findall(r"^restart \d+ of", text, re.MULTILINE)) + (process.returncode != 0)
            count.tracebacks += text.count("Traceback (most recent call last)")
            if process.returncode == 0 or self._is_done():
                return done
            assert process.returncode in (1, -signal.SIGKILL), f"exit code {process.returncode}:\n{text}"

    def _is_done(self) -> bool:
        """Whether a launcher was killed after the last step was saved."""
        is_saved = integrity.whole(Path("runs", self.names[-1], files.FOLDER))
        return bool(is_saved) and saved_step(self.names[-1]) == STEPS

    def _start(self) -> tuple[subprocess.Popen[bytes], Path]:
        self.names = [name for name in self.names if integrity.whole(Path("runs", name, files.FOLDER))]
        resume = ("--resume", f"runs/{self.names[-1]}") if self.names else ()
        self.starts += 1
        name = f"{self.number}-{self.starts}"
        self.names.append(name)
        return train(name, "--restarts", "1000", *resume)

    def _kill(self, kind: str, process: subprocess.Popen[bytes]) -> bool:
        """Wait for one to be there, and then for a moment of its life; whether it was there to be killed."""
        chosen = self.draws.choice(list(KINDS)) if kind == ANY else kind
        try:
            found = [one for one in KINDS[chosen](psutil.Process(process.pid)) if one.status() != psutil.STATUS_ZOMBIE]
            if not found:
                time.sleep(0.02)
                return False
            time.sleep(self.draws.uniform(0, self.patience_seconds))
            self.draws.choice(found).kill()
        except psutil.Error:
            return False
        if chosen == "launcher":
            process.wait(LONGEST_SECONDS)
        return True


def train(name: str, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Begin to train; what it says goes to a file."""
    said = Path(f"{name}.err")
    command = [sys.executable, "-m", "evenstep", "train", f"{TASK.name}:of_samples", "--name", name, *OPTIONS, *options]
    with said.open("wb") as file:
        environment = {**os.environ, **ENVIRONMENT}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=file), said


def trial(kinds: Sequence[str], kills: int, seed: int = 0) -> Iterator[tuple[str, Count]]:
    """So many kills, shared out among the kinds, in this folder; what became of those of each kind."""
    shutil.copy(TASK, TASK.name)
    begun = time.monotonic()
    process, said = train("undisturbed")
    assert process.wait(LONGEST_SECONDS) == 0, said.read_text()
    patience_seconds = max(LEAST_PATIENCE_SECONDS, PATIENCE * (time.monotonic() - begun))
    numbers, draws = itertools.count(1), random.Random(seed)
    for place, kind in enumerate(kinds):
        left = kills // len(kinds) + (place < kills % len(kinds))
        count = Count()
        while left:
            training = Training(next(numbers), draws, patience_seconds)
            done = training.suffer(kind, left, count)
            judge(training, count)
            count.killed += done
            left -= done
        yield kind, count


def judge(training: Training, count: Count) -> None:
    """Count what a training lost and did twice, and compare its weights."""
    found = re.search(r"(\d+) repeated, (\d+) missed", audit(*training.names))
    assert found is not None
    count.trainings += 1
    count.repeated += int(found[1])
    count.lost += int(found[2])
    count.bit_equal += weights(training.names[-1]) == weights("undisturbed")


def row(kind: str, count: Count) -> str:
    equal = f"{count.bit_equal} of {count.trainings}"
    numbers = (count.killed, count.restarted, count.lost, count.repeated, equal, count.tracebacks)
    return f"{kind:<14}" + "".join(f"{number:>11}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS, ANY], choices=[*KINDS, ANY])
    given = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="kills-")
    os.chdir(folder)
    names = ("killed", "restarted", "lost", "repeated", "bit-equal", "tracebacks")
    print(f"{'process':<14}" + "".join(f"{name:>11}" for name in names), flush=True)
    counts = []
    for kind, count in trial(given.kinds, given.kills, given.seed):
        print(row(kind, count), flush=True)
        counts.append(count)
    is_well = all(count.is_well for count in counts)
    os.chdir("/")
    if is_well:
        shutil.rmtree(folder)
    sys.exit(0 if is_well else f"not all was well; see {folder}")


if __name__ == "__main__":
    main()
