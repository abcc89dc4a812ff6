"""Runs on a real Ray cluster of two nodes on this machine: where Ray places them, and what becomes of a lost node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenstep.audit import audit
from evenstep.record import Record
from tests.faults.test_machines import TASK
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000), pytest.mark.filterwarnings("ignore")]

RAY = {
    # Else Ray writes a token into the home of whoever runs the tests.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # 15 by default: on a machine that runs other tests, processes would hardly run at all.
    "RAY_worker_niceness": "0",
}
PATIENCE = 300.0
"""In seconds, on two cores that other tests use too."""
MEMORY = {"object_store_memory": 80_000_000}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Nodes with these numbers of CPUs, two with one each unless told; the first is the head of the cluster."""
    first, *others = getattr(request, "param", (1, 1))
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'evenstep[ray]'")
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": first, "include_dashboard": False, **MEMORY})
    for num in others:
        cluster.add_node(num_cpus=num, **MEMORY)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    Path("my_task.py").write_text(TASK)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def start(*options: str, **environment: str) -> subprocess.Popen[str]:
    words = ["train", "my_task.py", "--on", "ray", "--devices", "2", "--audit", "--name", "mine", *options]
    return subprocess.Popen(
        [sys.executable, "-m", "evenstep", *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_taken(step: int) -> bool:
    record = Path("runs/mine/record.jsonl")
    return record.exists() and f'"step": {step},' in record.read_text()


def num_processes() -> int:
    """Ranks that the latest attempt started with."""
    logs = Path("runs/mine/logs")
    return len({path.name for path in logs.rglob("rank*.out")})


def launchers() -> list[str]:
    found = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if re.search(r"-m evenstep train my_task.py .*--name mine", line)]


def test_a_run_on_two_nodes_goes_on_when_one_is_lost(nodes: Any) -> None:
    run = start("--epochs", "12", "--checkpoint-every", "5", STEP_SECONDS="0.25")
    wait_until(lambda: has_taken(12) or run.poll() is not None, seconds=PATIENCE, otherwise=lambda: str(launchers()))
    assert num_processes() == 2
    (second,) = [node for node in nodes.list_all_nodes() if node is not nodes.head_node]
    nodes.remove_node(second)
    out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, err
    assert "2 machines, 2 processes" in err
    assert "Ray has lost launcher" in err
    assert "continuing from step-" in err
    assert "valid loss" in out
    found = audit(["runs/mine"])
    assert found.is_clean, found.problems
    assert (found.samples, found.epochs) == (60 * 12, 12)
    assert launchers() == []


def node_of_rank_0(nodes: Any) -> Any:
    """The node whose raylet started the launcher of rank 0."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "evenstep" in process.cmdline() and process.environ().get("PET_NODE_RANK") == "0":
                above = {one.pid for one in process.parents()}
                for node in nodes.list_all_nodes():
                    if {one.process.pid for one in node.all_processes["raylet"]} & above:
                        return node
    raise AssertionError(f"no launcher of rank 0 in {launchers()}")


@pytest.mark.parametrize("nodes", [(0, 1, 1)], indirect=True)
def test_a_run_that_loses_the_node_of_rank_0_starts_again_on_the_others(nodes: Any) -> None:
    """The head of the cluster, where the command runs, has no CPUs to give, as is usual on Kubernetes."""
    run = start("--epochs", "12", "--checkpoint-every", "5", STEP_SECONDS="0.25")
    wait_until(lambda: has_taken(12) or run.poll() is not None, seconds=PATIENCE, otherwise=lambda: str(launchers()))
    nodes.remove_node(node_of_rank_0(nodes))
    out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, err
    assert "Ray has lost the node of rank 0" in err
    assert "continuing from step-" in err
    assert "valid loss" in out
    assert audit(["runs/mine"]).is_clean
    assert launchers() == []


def test_a_stop_signal_saves_and_ends_with_75(nodes: Any) -> None:
    run = start("--epochs", "50", STEP_SECONDS="0.1")
    wait_until(lambda: has_taken(5) or run.poll() is not None, seconds=PATIENCE)
    run.send_signal(signal.SIGTERM)
    err = run.communicate(timeout=PATIENCE)[1]
    assert run.returncode == 75, err
    assert "continue from step-" in err
    resumed = start("--resume", "auto", "--epochs", "50")
    err = resumed.communicate(timeout=PATIENCE)[1]
    assert resumed.returncode == 0, err
    assert audit(["runs/mine"]).is_clean
    assert Record.read("runs/mine").summary is not None


def test_bad_input_is_refused_in_one_line_as_ever(nodes: Any) -> None:
    run = start("--batch", "1")
    out, err = run.communicate(timeout=PATIENCE)
    assert (run.returncode, out) == (2, "")
    assert "error: " in err
