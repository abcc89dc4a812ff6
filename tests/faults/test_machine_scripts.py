"""A script written for torchrun, on two machines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.hosts import hosts, why_no_hosts
from tests.faults.test_machines import TOKEN

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="env://")
total = torch.tensor(float(os.environ["RANK"]))
dist.all_reduce(total)
local = [None] * dist.get_world_size()
dist.all_gather_object(local, (int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])))
if dist.get_rank() == 0:
    print("sum", total.item(), "places", local, "arguments", sys.argv[1:], flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_finds_all_processes_of_both_machines(tmp_path: Path) -> None:
    why = why_no_hosts()
    if why:
        pytest.skip(why)
    with hosts(2, names="loopback") as machines:
        where = f"{machines[0].address}:29400"
        command = [sys.executable, "-m", "evenstep", "run", "--devices", "2", "--machines", "2", "--rendezvous", where]
        started = []
        for machine in machines:
            folder = tmp_path / machine.name
            folder.mkdir()
            (folder / "script.py").write_text(SCRIPT)
            started.append(machine.start([*command, "script.py", "--lr", "0.1"], cwd=folder, env=TOKEN))
        codes = [process.wait(timeout=90) for process in started]
        said = [machine.said() for machine in machines]
    assert codes == [0, 0], said
    assert "sum 6.0 places [(0, 0), (0, 1), (1, 0), (1, 1)] arguments ['--lr', '0.1']" in said[0]
