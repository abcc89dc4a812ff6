"""Starts the ranks of bench/links.py on hosts, two on each."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.hosts import Host

BENCH = Path(__file__).with_name("links.py").resolve()
LONGEST_SECONDS = 900
_ports = itertools.count(29701)


def on_hosts(machines: Sequence[Host], spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What two ranks on each of the hosts found."""
    spec = {**spec, "out": str(folder / "found.json")}
    size = 2 * len(machines)
    at = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": str(next(_ports)), "GLOO_SOCKET_IFNAME": "eth0"}
    started = []
    for rank in range(size):
        number, local = divmod(rank, 2)
        own = {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": 2}
        env = {**at, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in own.items()}}
        started.append(machines[number].start([sys.executable, str(BENCH), "--worker", json.dumps(spec)], env=env))
    for process in started:
        if process.wait(timeout=LONGEST_SECONDS):
            raise SystemExit("".join(machine.said() for machine in machines)[-3000:])
    found: dict[str, Any] = json.loads(Path(spec["out"]).read_text())
    return found
