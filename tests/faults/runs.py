"""Real commands in the test's own folder, with a fault in them, and what they leave behind.

ended = train("--restarts", "1", fault=fail("kill", rank=1, step=7, once=True))
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from evenstep.checkpoint import files, integrity
from evenstep.record import Record
from tests.more_flags import more_flags
from tests.waiting import wait_until

FOLDER = Path("runs/one")
CHECKPOINTS = FOLDER / files.FOLDER
TASK = Path(__file__).with_name("faulty.py")
LONGEST_SECONDS = 100


def fail(kind: str, rank: int, step: int, once: bool = False) -> dict[str, str]:
    """The environment of a run in which this happens; `once`, although the run is started again."""
    return {"FAULT": f"{kind}:{rank}:{step}", **({"FAULT_ONCE": "1"} if once else {})}


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> list[str]:
        """The lines from the word error on."""
        return f"\n{self.err}".rpartition("\nerror: ")[2].strip().splitlines()


def train(
    *options: str,
    fault: Mapping[str, str] | None = None,
    task: str = "of_tensors",
    devices: int = 2,
    name: str = "one",
    **environment: str,
) -> Ended:
    """Train to whatever end it comes to; nothing of it may be there 2 s later."""
    process = start(*options, fault=fault, task=task, devices=devices, name=name, **environment)
    out, err = process.communicate(timeout=LONGEST_SECONDS)
    nothing_is_left(seconds=2)
    return Ended(process.returncode, out, err)


def start(
    *options: str,
    fault: Mapping[str, str] | None = None,
    task: str = "of_tensors",
    devices: int = 2,
    name: str = "one",
    **environment: str,
) -> subprocess.Popen[str]:
    """Begin to train."""
    if not Path(TASK.name).exists():
        shutil.copy(TASK, TASK.name)
    arguments = [f"{TASK.name}:{task}", "--devices", str(devices), "--name", name, *more_flags(devices), *options]
    return subprocess.Popen(
        [sys.executable, "-m", "evenstep", "train", *arguments],
        env={**os.environ, **(fault or {}), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def audit(*names: str) -> str:
    """What `evenstep audit` says of these runs."""
    command = [sys.executable, "-m", "evenstep", "audit", *(f"runs/{name}" for name in names or ("one",))]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def weights(name: str = "one", folder: Path = Path()) -> bytes:
    """The newest weights, bit for bit."""
    return (folder / "runs" / name / files.FOLDER / "latest" / files.WEIGHTS).read_bytes()


def saved_step(name: str = "one") -> int:
    """The step of the newest checkpoint, after a look at every byte of it."""
    path, _ = integrity.find(f"runs/{name}")
    return int(files.read_state(path)["step"])


def steps(name: str = "one") -> list[int]:
    """The steps of the record, as they count in the end."""
    return [step.step for step in Record.read(f"runs/{name}").steps]


def samples(*names: str) -> dict[int, set[int]]:
    """The ids of every step; of steps that were done again, the last time counts."""
    folders = [Path("runs", name) for name in names]
    files = [file for folder in folders for file in sorted(folder.glob("samples*.jsonl"), key=os.path.getmtime)]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {line["step"]: set(line["ids"]) for line in lines}


def said_by_ranks(logs: str = "logs") -> list[str]:
    """The errors that the ranks reported."""
    return [json.loads(path.read_text())["message"] for path in sorted((FOLDER / logs).glob("rank*.error.json"))]


def processes() -> list[psutil.Process]:
    """Everything that a run of this test has started: ranks, loader workers, the fork server, the launcher."""
    here = str(Path.cwd())
    found = psutil.process_iter(["cwd", "status"])
    return [one for one in found if one.info["cwd"] == here and one.pid != os.getpid()]


def nothing_is_left(seconds: float) -> None:
    """Fail if a process of this test is still there after so long."""
    wait_until(lambda: not processes(), seconds, lambda: f"left: {processes()}")
