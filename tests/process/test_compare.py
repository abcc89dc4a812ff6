"""`evenstep compare`, by its command: what is measured, that it is whole, and what is said of it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenstep.compare.measure import Block, measure
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import prepare
from evenstep.record import PARTS, Measurement, Record
from evenstep.report.comparison import Comparison
from tests.marks import first_is_quick

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(600, 20)
y = (x[:, :3].sum(1) > 0).long()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(1))

    def forward(self, data):
        return data * self.factor


def task() -> Task:
    return Task(
        # A buffer, which ddp and fsdp send before forward.
        model=lambda: nn.Sequential(nn.Linear(20, 64), Scaled(), nn.ReLU(), nn.Linear(64, 2)),
        train=(x, y),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        # One that refuses to be stepped more often than it was told.
        scheduler=lambda optimizer, num_steps: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=num_steps
        ),
        batch=32,
    )


def normed() -> Task:
    model = lambda: nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return Task(model=model, train=(x, y), loss=task().loss, optimizer=task().optimizer, batch=32)


def sparse() -> Task:
    def model():
        net = nn.Sequential(nn.Linear(20, 2))
        net.names = nn.Embedding(3, 3, sparse=True)
        net.forward = lambda data: net[0](data)
        return net
    return Task(model=model, train=(x, y), loss=task().loss, optimizer=task().optimizer, batch=32)
"""
NUM_PARAMETERS = 20 * 64 + 64 + 64 * 2 + 2
RECOMMENDING = ("Recommended: ", "Recommended, if these times hold: ", "Nothing is recommended: ")
QUICK = ("--rounds", "2", "--steps", "6")


@pytest.fixture(autouse=True)
def _task_file() -> None:
    Path("my_task.py").write_text(TASK)


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", "compare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def as_json(*arguments: str) -> dict[str, Any]:
    ended = compare(*arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


WAYS = {
    "single": {"strategy": "single"},
    "dp": {"strategy": "dp", "devices": ("cpu", "cpu")},
    "ddp": {"strategy": "ddp", "devices": ("cpu", "cpu")},
    "fsdp": {"strategy": "fsdp", "devices": ("cpu", "cpu")},
    "accumulating": {"strategy": "ddp", "devices": ("cpu", "cpu"), "accumulate": 4},
}


class Blocks(dict[str, Record]):
    """A block of each way, measured when it is first looked at."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Record:
        # Its last counted step is the short one at the end of an epoch.
        block = Block(warm_up=5, steps=14, special=6)
        with contextlib.chdir(self._folder):
            Path("my_task.py").write_text(TASK)
            base = prepare("my_task.py", {"name": f"measured-{name}"})
            prepared = variant(base, base.folder / name, steps=block.plan_steps, **WAYS[name])
            for _ in run_in_processes(prepared, partial(measure, block=block)):
                pass
            self[name] = Record.read(prepared.folder)
        return self[name]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Blocks:
    return Blocks(tmp_path_factory.mktemp("blocks"))


def measurement(record: Record) -> Measurement:
    assert record.measurement is not None
    return record.measurement


def test_a_comparison_has_a_table_a_recommendation_and_a_page() -> None:
    ended = compare("my_task.py", "--devices", "2", "--strategies", "ddp", *QUICK, "--name", "mine")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("✓ same") == 1
    # On a busy machine, times may be doubted, or impossible.
    advice = Comparison.read("runs/mine").advice
    assert [line for line in advice if line.startswith(RECOMMENDING)] != []
    assert "Bottleneck: " in ended.stdout or [line for line in advice if line.startswith(RECOMMENDING[-1])]
    assert "page  runs/mine/page.html" in ended.stdout
    assert "ddp x 2" in Path("runs/mine/page.html").read_text()
    assert [row.label for row in Comparison.read("runs/mine").rows] == ["single", "ddp x 2"]


@pytest.mark.slow
def test_the_cost_of_virtual_replicas_is_shown_beside_the_plain_step() -> None:
    ways = ("--devices", "2", "--strategies", "ddp,fsdp", "--virtual-replicas", "4", "--rounds", "1", "--steps", "6")
    ended = compare("my_task.py", *ways, "--name", "mine")
    assert ended.returncode == 0, ended.stderr
    found = Comparison.read("runs/mine")
    plain = ["single", "ddp x 2", "fsdp x 2"]
    assert [row.label for row in found.rows] == [*plain, *(f"{label}, V=4" for label in plain)]
    assert all("V=4" not in line for line in found.advice if line.startswith(RECOMMENDING))
    (cost,) = [
        line
        for line in found.advice
        if line.startswith("Bit-identical results on any number of devices (--virtual-replicas)")
    ]
    assert all(f"{label} " in cost for label in plain)
    assert "ddp x 2, V=4" in Path("runs/mine/page.html").read_text()


@pytest.mark.slow
def test_a_comparison_of_all_strategies_measures_each_in_turn() -> None:
    ended = compare("my_task.py", "--devices", "1,2", *QUICK, "--name", "mine")
    assert ended.returncode == 0, ended.stderr
    for label in ("single", "dp x 2", "ddp x 2", "fsdp x 2"):
        assert f"\n{label} " in f"\n{ended.stdout}"
    assert ended.stdout.count("✓ same") == 3
    assert [line for line in Comparison.read("runs/mine").advice if line.startswith(RECOMMENDING)] != []
    assert "round 2 of 2: fsdp x 2\nround 2 of 2: ddp x 2\nround 2 of 2: dp x 2\nround 2 of 2: single" in ended.stderr
    page = Path("runs/mine/page.html").read_text()
    assert "page  runs/mine/page.html" in ended.stdout
    assert "ddp x 2" in page
    found = Comparison.read("runs/mine")
    assert found.command.endswith("--rounds 2 --steps 6 --name mine")
    assert [row.label for row in found.rows] == ["single", "dp x 2", "ddp x 2", "fsdp x 2"]
    assert [len(row.runs) for row in found.rows] == [2, 2, 2, 2]
    first = [Record.read(Path("runs/mine") / row.runs[0]) for row in found.rows]
    assert all(record.losses == pytest.approx(first[0].losses, rel=1e-4) for record in first)


@pytest.mark.slow
@pytest.mark.parametrize("config", WAYS)
def test_the_parts_leave_no_moment_of_a_step_out(blocks: Blocks, config: str) -> None:
    found = measurement(blocks[config])
    assert sum(found.parts.values()) == pytest.approx(found.timed_seconds, rel=1e-6)
    assert all(found.parts[name] > 0 for name in PARTS if name not in ("communication", "bubble"))
    assert found.parts["bubble"] == 0
    assert (found.parts["communication"] > 0) == (config != "single")
    assert (found.without_communication_seconds is not None) == (config != "single")
    for timeline in blocks[config].timelines:
        for lane in timeline.lanes:
            if lane.name == "host":
                names = [name for name, _, _ in lane.spans]
                assert (names[0], names.count("input"), names[-1]) == ("input", 1, "optimizer")
                assert all(before[2] == after[1] for before, after in pairwise(lane.spans))


@pytest.mark.parametrize(
    ("config", "num_numbers"),
    # ddp sends the one number of the buffer before forward and then gradients; dp parameters and gradients.
    first_is_quick(
        [("ddp", 1 + NUM_PARAMETERS), ("single", 0), ("accumulating", 1 + NUM_PARAMETERS), ("dp", 2 * NUM_PARAMETERS)]
    ),
)
def test_what_is_sent_is_counted(blocks: Blocks, config: str, num_numbers: int) -> None:
    assert measurement(blocks[config]).sent_bytes == 4 * num_numbers


@pytest.mark.slow
def test_fsdp_sends_slices_and_gradients(blocks: Blocks) -> None:
    # Half of the parameters before forward, and whole gradients: those of two layers, which are small enough to be
    # kept for backward.
    assert 4 * NUM_PARAMETERS <= measurement(blocks["fsdp"]).sent_bytes <= 3 * 4 * NUM_PARAMETERS


@pytest.mark.parametrize("config", first_is_quick(["ddp", *(name for name in WAYS if name != "ddp")]))
def test_the_samples_of_a_block_are_those_of_its_steps(blocks: Blocks, config: str) -> None:
    record = blocks[config]
    counted = [step.samples for step in record.steps[5:19]]
    assert min(counted) == 600 % 32
    assert measurement(record).samples == sum(counted)
    assert len(measurement(record).step_seconds) == 14


def test_the_gradients_travel_between_backward_and_the_optimizer(blocks: Blocks) -> None:
    lanes = {(lane.rank, lane.name): lane.spans for lane in blocks["ddp"].timelines[-1].lanes}
    assert lanes.keys() == {(0, "host"), (0, "network"), (1, "host"), (1, "network")}
    assert [name for name, _, _ in lanes[0, "network"]] == ["buffers", "gradients"]
    backward = next(begin for name, begin, _ in lanes[0, "host"] if name == "backward")
    optimizer = next(begin for name, begin, _ in lanes[0, "host"] if name == "optimizer")
    assert backward < lanes[0, "network"][1][1] < lanes[0, "network"][1][2] < optimizer


@pytest.mark.slow
def test_ctrl_c_ends_it_with_nothing_left_running() -> None:
    command = [
        sys.executable,
        "-m",
        "evenstep",
        "compare",
        "my_task.py",
        "--strategies",
        "ddp",
        "--rounds",
        "50",
        "--steps",
        "6",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("round 1 of 50: ddp"):
                break
        time.sleep(1)
        everything = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert rest.endswith("stopped\n")
    _, alive = psutil.wait_procs(everything, timeout=2)
    assert alive == []


@pytest.mark.slow
def test_a_way_that_learns_something_else_is_marked_and_not_recommended() -> None:
    found = as_json("my_task.py:normed", "--devices", "2", "--strategies", "ddp", *QUICK)
    single, ddp = found["rows"]
    assert (single["parity"], ddp["parity"]) == ("reference", "differs")
    assert "BatchNorm" in ddp["why"]
    (at,) = [place for place, line in enumerate(found["advice"]) if line.startswith(RECOMMENDING)]
    assert ": single" in found["advice"][at]
    assert "but it does not match single" in found["advice"][at + 1]


@pytest.mark.slow
def test_a_way_that_cannot_run_is_left_out_with_the_reason() -> None:
    found = as_json("my_task.py:sparse", "--devices", "2", "--strategies", "fsdp", *QUICK)
    assert [row["strategy"] for row in found["rows"]] == ["single"]
    assert "names makes sparse gradients (sparse=True)" in found["left_out"]["fsdp x 2"]


def test_links_are_compared_by_the_time_to_one_loss(tmp_path: Path) -> None:
    """The same seeds with each method; `local:1` is the same training as none."""
    command = [sys.executable, "-m", "evenstep", "compare", "digits", "--links", "none,local:1", "--seeds", "2"]
    done = subprocess.run(
        [*command, "--steps", "15", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    none, one = found["rows"]
    assert [row["link"] for row in found["rows"]] == ["none", "local:1"]
    assert one["final_loss"] == none["final_loss"]
    assert len(set(none["final_loss"])) == 2
    assert one["valid_loss"] == none["valid_loss"]
    assert all(loss > 0 for loss in none["valid_loss"])
    assert one["steps_to_target"] == none["steps_to_target"]
    assert found["target"] == max(none["final_loss"])
    assert len(none["ratio"]) == 3
    assert (Path(tmp_path, found["folder"]) / "links.json").exists()
