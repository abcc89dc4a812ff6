"""What a script finds under `evenstep run` is what torchrun gives it: the process, its threads, its children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenstep.launcher.script import Script, TorchrunOptions, in_our_words
from tests.process.test_scripts import SCRIPTS, no_ranks

pytestmark = pytest.mark.fresh
LOOK = str(SCRIPTS / "look_around.py")
WITH_WORKERS = """
import multiprocessing
import os
import torch
from torch.utils.data import DataLoader, TensorDataset

def double(number):
    return 2 * number

data = TensorDataset(torch.arange(8.0))
collate = lambda rows: torch.stack([row[0] for row in rows])
loader = DataLoader(data, 4, num_workers=1, persistent_workers=True, collate_fn=collate)
for _ in range(2):
    assert torch.cat(list(loader)).tolist() == list(range(8))
assert multiprocessing.Pool(1).map(double, [1, 2]) == [2, 4]
queue = multiprocessing.Queue()
child = multiprocessing.Process(target=queue.put, args=(os.getppid(),))
child.start()
assert queue.get() == os.getppid()
child.join()
print(child.name, torch.arange(4.0).sum().item())
"""
GUARDED = """
import multiprocessing

class Number:
    def __init__(self, value):
        self.value = value

def double(number):
    return Number(2 * number.value)

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [Number(3)])[0].value)
"""
EXPLAINED = {
    # One open file each for stacks that are asked for and for those of a crash, closed by exec.
    "open files",
    # A name that outlives restarts is not torchrun's; the address is that of loopback.
    "environment",
    "drawn",
    # Ranks share one: it is the first that reads it who gets what was typed.
    "stdin",
}


def started(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        env={**no_ranks(), **environment},
        input="typed",
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done


def seen(rank: int) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(f"seen{rank}.json").read_text())
    assert Path(f"exit{rank}").exists()
    return values


def test_an_unguarded_script_has_loader_workers_a_lambda_and_a_pool() -> None:
    Path("script.py").write_text(WITH_WORKERS)
    done = started("evenstep", "run", "--devices", "2", "script.py")
    assert done.stdout.split() == ["Process-3", "6.0"]
    assert done.stderr == ""


@pytest.mark.slow
def test_a_script_spawns_what_it_defines() -> None:
    Path("script.py").write_text(GUARDED)
    assert started("evenstep", "run", "script.py").stdout.splitlines() == ["spawn 6", "forkserver 6"]


@pytest.mark.slow
def test_a_script_finds_a_new_main_process() -> None:
    started("evenstep", "run", "--devices", "2", LOOK, "--lr", "0.1")
    first, second = seen(0), seen(1)
    assert first["start method"] == [None, "fork"]
    assert first["process"] == ["MainProcess", False, "_MainProcess"]
    assert first["parent"] == "None"
    assert first["argv"] == [[LOOK, "--lr", "0.1"], [sys.executable, "-u", LOOK, "--lr", "0.1"]]
    assert first["path"][0] == str(SCRIPTS)
    assert os.path.dirname(sys.executable) not in first["path"]
    assert first["main"]["__file__"] == repr(LOOK)
    assert first["name"] == ["__main__", True]
    kept = {name for name, (_, outlives_exec) in first["open files"].items() if outlives_exec}
    assert kept == {"0", "1", "2"}
    assert len(first["open files"]) == 5
    assert first["is session leader"]
    assert {first["stdin"], second["stdin"]} == {"typed", ""}
    assert {name for name in first["environment"] if name.startswith("EVENSTEP_")} == set()
    assert all(mine != theirs for mine, theirs in zip(first["drawn"], second["drawn"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "num"), [({}, 1), pytest.param({"OMP_NUM_THREADS": "3"}, 3, marks=pytest.mark.slow)], ids=["unset", "set"]
)
def test_a_script_computes_with_the_threads_that_the_environment_says(given: dict[str, str], num: int) -> None:
    started("evenstep", "run", "--devices", "2", LOOK, **given)
    assert seen(0)["environment"]["OMP_NUM_THREADS"] == str(num)
    for counts in seen(0)["computing threads"]:
        assert {line.rpartition(" : ")[2] for line in counts[:-1]} == {str(num)}
        assert {number for _, number in counts[-1]} <= {num, os.cpu_count()}


HANGS = """
import sys
import time
from torch.utils.data import DataLoader

class Numbers(list):
    def __getitem__(self, number):
        return number if number < 4 else time.sleep(3600)

def tell(kind, error, trace):
    open("told", "w").write(kind.__name__)

sys.excepthook = tell
for number in DataLoader(Numbers(range(8)), num_workers=1, prefetch_factor=1):
    if number == int(sys.argv[1]):
        raise ValueError(number)
"""


@pytest.mark.slow
def test_a_loader_worker_that_hangs_ends_with_its_rank(tmp_path: Path) -> None:
    Path("script.py").write_text(HANGS)
    command = [sys.executable, "-m", "evenstep", "run", "--stall-after", "2", "script.py", "9"]
    done = subprocess.run(command, capture_output=True, text=True, env=no_ranks(), timeout=100)
    assert done.returncode == 124, done.stderr
    here = {one.pid for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(tmp_path)}
    assert here == {os.getpid()}


@pytest.mark.slow
def test_an_exception_reaches_the_hook_of_the_script() -> None:
    Path("script.py").write_text(HANGS)
    command = [sys.executable, "-m", "evenstep", "run", "script.py", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=no_ranks(), timeout=100)
    assert done.returncode == 1
    assert "script.py:16 in <module>: raise ValueError(number)" in done.stderr
    assert Path("told").read_text() == "ValueError"


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), pytest.param(("--fresh",), marks=pytest.mark.slow)])
def test_a_script_does_not_find_the_token_of_its_launcher(how: tuple[str, ...]) -> None:
    """Neither where it looks, nor in what its process was started with."""
    Path("script.py").write_text("import os\nprint(open('/proc/self/environ').read(), dict(os.environ))\n")
    secrets = {"EVENSTEP_TOKEN": "what-machines-share", "EVENSTEP_TOKEN_FILE": "what-machines-share"}
    done = started("evenstep", "run", *how, "--devices", "2", "script.py", **secrets)
    assert "WORLD_SIZE" in done.stdout
    assert "what-machines-share" not in done.stdout


@pytest.mark.slow
def test_the_options_of_torchrun_are_known() -> None:
    Path("script.py").write_text("import os, torch\nprint(os.environ['WORLD_SIZE'], torch.get_num_threads())\n")
    options = (
        "--standalone",
        "--nnodes=1",
        "--rdzv-endpoint",
        "localhost:0",
        "--nproc_per_node",
        "2",
        "--max-restarts=1",
    )
    done = started("evenstep", "run", *options, "script.py", "--lr", "1")
    assert done.stdout == "2 1\n"
    assert done.stderr == "in evenstep's words: evenstep run --devices 2 --restarts 1 script.py ...\n"
    more = (
        "--node_rank=0",
        "--master-addr",
        "localhost",
        "--master_port=29501",
        "--rdzv-backend=c10d",
        "--rdzv_id",
        "7",
    )
    done = started("evenstep", "run", "--nnodes", "1", *more, "--nproc-per-node=2", "script.py")
    assert done.stdout == "2 1\n"
    assert started("evenstep", "run", "--devices", "2", "script.py").stderr == ""


def test_the_address_of_the_first_machine_is_taken_from_torchruns_options() -> None:
    given = TorchrunOptions(node_rank="1", master_addr="node1", rdzv_backend="static")
    script = Script("train.py", ("--lr", "1"), 2, machines="2", rendezvous=given.rendezvous)
    assert script.rendezvous == "node1:29500"
    words = ["--nnodes", "2", "--nproc_per_node=2"]
    assert in_our_words(script, words) == "evenstep run --devices 2 --machines 2 --rendezvous node1:29500 train.py ..."
    assert in_our_words(script, ["--devices", "2", "--machines=2"]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("num", ["1", "2"])
@pytest.mark.parametrize("how", [(), ("--fresh",)], ids=["copied", "fresh"])
def test_a_script_finds_what_torchrun_gives(how: tuple[str, ...], num: str) -> None:
    started("torch.distributed.run", "--standalone", "--nproc-per-node", num, LOOK, "--lr", "0.1")
    theirs = seen(0)
    started("evenstep", "run", "--devices", num, *how, LOOK, "--lr", "0.1")
    ours = seen(0)
    assert {name: value for name, value in ours.items() if name not in EXPLAINED} == {
        name: value for name, value in theirs.items() if name not in EXPLAINED
    }
    assert set(ours["environment"]) == set(theirs["environment"])
    different = {name for name, value in theirs["environment"].items() if ours["environment"][name] != value}
    alone = {"TORCHELASTIC_USE_AGENT_STORE"} if num == "1" else set()
    assert different == {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", *alone}


ALONE = """
import torch

model = torch.nn.Linear(2, 1)
torch.optim.SGD(model.parameters(), lr=0.1)
"""
JOINS = """
import torch.distributed as dist

dist.init_process_group("gloo")
dist.destroy_process_group()
"""
SPAWNS = """
import torch.multiprocessing as mp

def train(rank): ...

if __name__ == "__main__":
    mp.spawn(train, nprocs=1)
"""
ONLY_A_TASK = """
import evenstep

def task() -> evenstep.Task: ...
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (ALONE, "script.py never joined its 2 processes, so each trained its own model;"),
        (JOINS + ALONE, ""),
        (ONLY_A_TASK, "script.py defines a task, and ran nothing; write: evenstep train script.py"),
    ],
    ids=["alone", "joined", "task"],
)
def test_a_warning_names_a_script_that_trains_a_model_in_each_process(text: str, warning: str) -> None:
    Path("script.py").write_text(text)
    done = started("evenstep", "run", "--devices", "2", "script.py")
    assert warning in done.stderr
    assert ("warning" in done.stderr) == bool(warning)


@pytest.mark.parametrize(("devices", "num_lines"), [("2", 1), ("1", 0)])
def test_a_warning_names_the_line_of_a_script_that_starts_processes_in_each_process(
    devices: str, num_lines: int
) -> None:
    Path("script.py").write_text(SPAWNS)
    done = started("evenstep", "run", "--devices", devices, "script.py")
    warning = (
        "warning: script.py starts its own processes (line 7: mp.spawn), here in each of the 2; run it with python "
        "script.py, or call train(...) there, with the rank from the environment variable RANK, and evenstep starts "
        "the processes"
    )
    assert done.stderr.splitlines() == [warning] * num_lines
