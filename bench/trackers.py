"""What trackers cost a run: the seconds of its steps with `--log`, against two runs without, in turn.

python bench/trackers.py [ROUNDS [OUT.json]]      on the CPU, two to three minutes with 3 rounds

`gone` is MLflow with a server that does not answer: nobody listens at its port. Both cores train, so whatever feeds a
tracker has no core of its own. Needs evenstep[trackers].
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import harness

STEPS = 1000
HOW = ("--strategy", "ddp", "--devices", "cpu,cpu", "--threads", "1", "--steps", str(STEPS), "--quiet", "--json")
CONDITIONS = {
    "without": "",
    "without, again": "",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "mlflow, gone": "mlflow",
    "wandb": "wandb",
    "trackio": "trackio",
}


def step_ms(condition: str) -> float:
    """The mean over all steps after the first, as the Record has them."""
    environment = {**os.environ, "TRACKIO_DIR": str(Path("trackio").absolute())}
    if condition == "mlflow, gone":
        environment["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{_unused_port()}"
    log = ("--log", CONDITIONS[condition]) if CONDITIONS[condition] else ()
    command = [sys.executable, "-m", "evenstep", "train", "digits", *HOW, *log]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    record = Path(json.loads(done.stdout)["run"], "record.jsonl")
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if row["kind"] == "step"][1:]
    return 1e3 * sum(seconds) / len(seconds)


def _unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    blocks: dict[str, Callable[[], float]] = {name: (lambda name=name: step_ms(name)) for name in CONDITIONS}
    with harness.in_scratch():
        figures = harness.interleaved(blocks, rounds)
    results = {}
    for name in list(CONDITIONS)[1:]:
        found = harness.compared(figures["without"], figures[name])
        results[name] = found.figures("ms")
        print(f"{name:<16} {found.second:7.3f} ms a step, x {found.ratio:.3f} ({found.interval})")
    if len(sys.argv) > 2:
        harness.write(sys.argv[2], f"python bench/trackers.py {rounds}", results)


if __name__ == "__main__":
    main()
