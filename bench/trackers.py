"""What trackers cost a run: the seconds of its steps with `--log`, against two runs without, in turn.

python bench/trackers.py [ROUNDS [OUT.json]]      on the CPU, two to three minutes with 3 rounds
python bench/trackers.py share                    what the process that feeds a tracker gets of a busy core

`gone` is MLflow with a server that does not answer: nobody listens at its port. Both cores train, so whatever feeds a
tracker has no core of its own. Needs evenstep[trackers].
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import harness
import psutil

from evenstep.plan import Plan
from evenstep.record import RecordWriter
from evenstep.trackers.tracker_process import NICENESS, start_follower

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


def print_shares() -> None:
    """Beside a process that never waits, both on one core, each in a session of its own as ranks are."""
    run = Path("runs/one")
    run.mkdir(parents=True)
    RecordWriter(run, Plan(batch=1, steps=1, log="mlflow", name="one"), {}, {}).close()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    feeding = start_follower("mlflow", run).process
    os.sched_setaffinity(0, cores)
    try:
        while os.getpriority(os.PRIO_PROCESS, feeding.pid) != NICENESS:
            time.sleep(0.1)
        print(f"as in a run: {_share(feeding.pid, busy.pid):.1%}")
        Path(f"/proc/{feeding.pid}/autogroup").write_text("0")
        print(f"with niceness {NICENESS} alone: {_share(feeding.pid, busy.pid):.1%}")
    finally:
        for process in (feeding, busy):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _share(pid: int, other: int) -> float:
    """While it imports MLflow, until both have taken a second."""
    processes = (psutil.Process(pid), psutil.Process(other))
    begun = [sum(one.cpu_times()[:2]) for one in processes]
    while True:
        taken = [sum(one.cpu_times()[:2]) - before for one, before in zip(processes, begun, strict=True)]
        if sum(taken) >= 1:
            return taken[0] / sum(taken)
        time.sleep(0.05)


def main() -> None:
    if sys.argv[1:] == ["share"]:
        with harness.in_scratch():
            print_shares()
        return
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
