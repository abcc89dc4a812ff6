"""Running a script of the user's as several processes, as torchrun would."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Sequence
from pathlib import Path

from evenstep.errors import PlanError, WorkerFailed
from evenstep.launch.processes import RankLogs, python, workers
from evenstep.worker.machine import share_threads


def run_script(script: str, arguments: Sequence[str], num_workers: int) -> None:
    """Rank 0 keeps the terminal; what the others print is in a folder below runs/."""
    if not Path(script).is_file():
        raise PlanError(f"no file {script}; give the script first, then its own arguments")
    if num_workers < 1:
        raise PlanError(f"{num_workers} devices were asked for; give 1 or more")
    stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    logs = RankLogs(Path("runs") / f"{stamp}-{Path(script).stem}" / "logs", open_ranks=[0])
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": str(share_threads(None, ["cpu"] * num_workers)),
    }
    entry, program = python(script, *arguments)
    with workers(entry, program, num_workers, logs, environment) as started:
        while started.poll():
            pass
        if started.exit_codes:
            rank, code = next(iter(sorted(started.exit_codes.items())))
            raise WorkerFailed(f"rank {rank} ended with exit code {code}; what the others printed is in {logs.folder}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
