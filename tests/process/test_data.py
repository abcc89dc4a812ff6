"""However data is given and read, every way learns the same; every sample once, whatever is killed in between."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from evenstep.audit import audit
from evenstep.plan import Plan
from evenstep.record import Record
from tests.fleet import Result, furthest, result, run_jobs
from tests.marks import first_is_quick, num_steps
from tests.more_flags import more_flags, num_devices
from tests.process.test_training import run_script
from tests.small_tasks import DATA_KINDS, NUM_SAMPLES, small_task

STEPS = num_steps(21, 25)
WAYS = {"dp-2": (1, 0), "ddp-2 with a worker": (2, 1), "ddp-2": (2, 0), "fsdp-3": (3, 0)}
"""(processes, loader workers of each)."""
SLOW = ("ddp-2", "fsdp-3")


def plan(where: str, workers: int) -> Plan:
    strategy, _, num = where.split(" ")[0].partition("-")
    return Plan(
        strategy=strategy,
        devices=("cpu",) * int(num or 1),
        batch=10,
        steps=STEPS,
        accumulate=2,
        precision="fp64",
        threads=1,
        workers=workers,
        audit=True,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("data")
    wanted = {item.callspec.params.get("where") for item in request.session.items if hasattr(item, "callspec")}
    ways = {"single": (1, 0), **{where: way for where, way in WAYS.items() if where in wanted}}
    wanted |= {item.callspec.params.get("kind") for item in request.session.items if hasattr(item, "callspec")}
    kinds = [kind for kind in DATA_KINDS if kind in wanted or kind.startswith(("curriculum", "scaler"))]
    for size in (1, 2, 3):
        own = {where: workers for where, (num, workers) in ways.items() if num == size}
        if not own:
            continue
        run_jobs(
            folder, size, [(f"{w} {kind}", plan(w, own[w]), f"mlp/adamw/mean/{kind}") for w in own for kind in kinds]
        )
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", [pytest.param(w, marks=pytest.mark.slow if w in SLOW else ()) for w in WAYS])
@pytest.mark.parametrize("kind", first_is_quick(DATA_KINDS, num_quick=4))
def test_data_of_every_kind_teaches_the_same_as_on_one_device(trained: Path, where: str, kind: str) -> None:
    single, other = result(trained, f"single {kind}"), result(trained, f"{where} {kind}")
    assert len(single.record.losses) == STEPS
    assert other.record.losses == pytest.approx(single.record.losses, rel=1e-9)
    assert furthest(compared(other), compared(single)) < 1e-9
    assert other.record.evaluations[-1].values == pytest.approx(single.record.evaluations[-1].values, rel=1e-9)
    lines = [(trained / f"{name} {kind}" / "samples.jsonl").read_text() for name in ("single", where)]
    assert lines[0] == lines[1]
    assert audit([trained / f"{where} {kind}"]).is_clean


def compared(trained: Result) -> dict[str, torch.Tensor]:
    """Its weights; not the last bits of a Scaler's mean, which are kept beside it."""
    return {name: weight for name, weight in trained.weights.items() if not name.endswith(".rest")}


@pytest.mark.parametrize("where", ["dp-2"])
def test_a_curriculum_shows_its_pace_in_the_record(trained: Path, where: str) -> None:
    steps = result(trained, f"{where} curriculum").record.steps
    pace = {step.epoch: step.epoch_samples for step in steps}
    assert pace == {0: round(0.2 * NUM_SAMPLES), 1: round(0.5 * NUM_SAMPLES), 2: NUM_SAMPLES, 3: NUM_SAMPLES}
    assert [step.epoch for step in steps].count(0) == 3


@pytest.mark.parametrize("where", ["ddp-2 with a worker"])
def test_a_scaler_is_fitted_on_all_ranks_together_and_saved(trained: Path, where: str) -> None:
    of_one, of_two = (result(trained, f"{name} scaler").weights for name in ("single", where))
    assert of_one["0.count"] == of_two["0.count"] == NUM_SAMPLES
    assert furthest({"mean": of_two["0.mean"]}, {"mean": of_one["0.mean"]}) < 1e-12
    assert of_one["0.deviation"].min() > 0.5


@pytest.mark.parametrize("where", ["dp-2"])
def test_a_scaler_sees_what_is_trained_on_and_nothing_else(trained: Path, where: str) -> None:
    weights = result(trained, f"{where} scaler-of-some").weights
    assert weights["0.count"] == 40
    some = small_task("mlp/adamw/mean").train[0][:40].double()
    torch.testing.assert_close(weights["0.mean"], some.mean(0), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(weights["0.deviation"], some.std(0, correction=0), rtol=1e-12, atol=0)


def test_a_stream_goes_on_in_the_middle_of_its_third_epoch_and_its_audit_knows(tmp_path: Path) -> None:
    """Resumed within an epoch whose length nobody knows yet, after two that are known."""
    key = "mlp/adamw/mean/stream"
    cut = replace(plan("single", 0), steps=25, checkpoint_every=25)
    run_jobs(tmp_path, 1, [("cut", cut, key), ("whole", replace(cut, steps=None, epochs=4), key)])
    saved = tmp_path / "cut" / "checkpoints" / "step-00000025"
    run_jobs(tmp_path, 1, [("on", replace(cut, steps=None, epochs=4, resume=str(saved)), key)])
    whole, on = result(tmp_path, "whole"), result(tmp_path, "on")
    assert on.record.losses == pytest.approx(whole.record.losses[25:], rel=1e-9)
    assert audit([tmp_path / "on"]).is_clean
    found = audit([tmp_path / "cut", tmp_path / "on"])
    assert found.sentence().startswith(f"{NUM_SAMPLES} samples x 4 epochs, 0 repeated, 0 missed")


# Killed, and gone on with.

TASK = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from evenstep import Task

class Slow(Dataset):
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 240

    def __getitem__(self, id_):
        time.sleep(0.01)
        return self.x[id_] + 0.1 * torch.randn(4), int(self.x[id_].sum() > 0)

def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 2)),
        train=Slow(),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        batch=12,
        epochs=2,
    )
"""


def command(*arguments: str) -> list[str]:
    options = ("--audit", "--checkpoint-every", "7", "--workers", "2")
    more = more_flags(num_devices(arguments))
    return [sys.executable, "-m", "evenstep", "train", "my_task.py", *options, *more, *arguments]


def train(*arguments: str) -> None:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def train_and_kill(name: str, at_step: int, *arguments: str) -> None:
    """Kill -9 the last rank after so many steps."""
    run = subprocess.Popen(command("--name", name, *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not steps_done(name) or steps_done(name)[-1] < at_step:
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(run.pid).children(recursive=True)
    ranks = [child for child in children if child.name().startswith("evenstep-rank")]
    readers = [reader for rank in ranks for reader in rank.children()]
    assert len(readers) >= 2 * len(ranks)
    ranks[-1].send_signal(signal.SIGKILL)
    assert run.wait(timeout=60) == 1
    _, alive = psutil.wait_procs([*ranks, *readers], timeout=3)
    assert alive == []


def steps_done(name: str) -> list[int]:
    file = Path("runs", name, "samples.jsonl")
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_on_2_gone_on_with_on_3_and_killed_and_finished_on_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(TASK)
    train("--devices", "2", "--name", "undisturbed")
    train_and_kill("first", 10, "--devices", "2")
    train("--resume", "runs/first", "--name", "same", "--devices", "2")
    train_and_kill("second", 24, "--resume", "runs/first", "--devices", "3")
    train("--resume", "runs/second", "--name", "third", "--devices", "1", "--strategy", "single", "--workers", "1")

    # The same number of processes: to the last bit what was never disturbed.
    assert weights("same") == weights("undisturbed")
    # Other numbers: to the last sample.
    chain = ["runs/third", "runs/first", "runs/second"]
    said = subprocess.run(
        [sys.executable, "-m", "evenstep", "audit", *chain], capture_output=True, text=True, timeout=60
    )
    assert said.stdout.startswith("240 samples x 2 epochs, 0 repeated, 0 missed")
    assert said.returncode == 0
    assert used(["first", "second", "third"]) == used(["undisturbed"])
    # Work was lost and done again, so the test was one.
    assert audit(chain).redone > 0

    # A line lost from the middle is noticed.
    samples = Path("runs/second/samples.jsonl")
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:2] + lines[3:]))
    spoilt = subprocess.run(
        [sys.executable, "-m", "evenstep", "audit", *chain], capture_output=True, text=True, timeout=60
    )
    assert spoilt.returncode == 1
    assert "12 missed" in spoilt.stdout


def weights(name: str) -> dict[str, list[float]]:
    file = Path("runs", name, "checkpoints", "latest", "weights.safetensors")
    return {key: value.flatten().tolist() for key, value in load_file(file).items()}


def used(chain: list[str]) -> dict[int, list[int]]:
    """The samples of every step; of steps that were done again, the last time counts."""
    steps = {}
    for name in chain:
        for line in Path("runs", name, "samples.jsonl").read_text().splitlines():
            step = json.loads(line)
            steps[step["step"]] = step["ids"]
    return steps


# What the ranks compare.

SHARED = """
import os
from dataclasses import replace
import torch
from torch import nn
from torch.utils.data import Dataset
from evenstep import Task

class Deaf(Dataset):
    \"\"\"Gives what comes next, whatever it is asked for.\"\"\"

    def __init__(self):
        self.numbers = iter(torch.arange(10000.0))

    def __len__(self):
        return 60

    def __getitem__(self, id_):
        return next(self.numbers).expand(4)

def task_of(train) -> Task:
    return Task(
        model=lambda: nn.Linear(4, 1),
        train=train,
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=6,
    )

class Spoilt(Deaf):
    \"\"\"Comes to grief at sample 7.\"\"\"

    def __init__(self, how):
        self.how = how

    def __getitem__(self, id_):
        if id_ == 7:
            self.how()
        return torch.arange(4.0) + id_

def divide():
    return 1 / 0

def kill():
    os.kill(os.getpid(), 9)

def raising() -> Task:
    return replace(task_of(Spoilt(divide)), sampler=list(range(59, -1, -1)))

def dying() -> Task:
    return replace(task_of(Spoilt(kill)), sampler=list(range(59, -1, -1)))

def deaf() -> Task:
    return task_of(Deaf())

"""


def test_ranks_that_read_the_same_are_told_so_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(SHARED)
    words = ["train", "my_task.py:deaf", "--devices", "2"]
    done = subprocess.run([sys.executable, "-m", "evenstep", *words], capture_output=True, text=True, timeout=60)
    assert "ranks 0 and 1 read the same data for different samples" in done.stderr
    assert done.returncode == 2
    assert not Record.read(next(Path("runs").iterdir())).steps


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_script("consistency_script.py", tmp_path_factory.mktemp("apart"))


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("right", "nothing"),
        ("all alike", "nothing"),
        ("periodic", "nothing"),
        ("drawn at random", "nothing"),
        ("a stream changed in place", "nothing"),
        ("meant to differ", "nothing"),
        ("deaf", "ranks 0 and 1 read the same data for different samples"),
        ("other data", "rank 1 has different data than rank 0: the same sample differs between them"),
        ("other order", "rank 1 takes its samples in a different order than rank 0"),
        ("other length", "rank 1 has 42 samples and rank 0 has 40"),
        ("a stream shared out", "rank 1 read a different stream than rank 0"),
        ("a stream of arrays shared out", "rank 1 read a different stream than rank 0"),
    ],
)
def test_what_ranks_read_is_compared(told: dict[str, str], way: str, said: str) -> None:
    assert told[way].startswith(said)


def test_random_data_is_to_be_made_after_the_join(told: dict[str, str]) -> None:
    cure = "Make random data after evenstep.join(), which seeds all ranks alike, or seed it. In a custom loop, use"
    assert cure in told["other data"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found in a loop that looks at its batches itself."""
    return run_script("custom_reading_script.py", tmp_path_factory.mktemp("by-hand"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("data", ["shared", "shared, as a dataset"])
def test_metrics_written_by_hand_meet_every_sample_once(counted: list[dict[str, Any]], data: str) -> None:
    found = [of_rank[data] for of_rank in counted]
    assert [one["samples"] for one in found] == [33, 32]
    assert [one["positive"] for one in found] == [33, 32]
    # As many calls of the model on each: under fsdp they are collectives.
    assert found[0]["pieces"] == found[1]["pieces"] == 5


def test_all_of_the_data_that_ranks_bring_themselves_is_used(counted: list[dict[str, Any]]) -> None:
    own = [of_rank["own"] for of_rank in counted]
    assert [one["seen"] for one in own] == [[1000.0 * rank + id_ for id_ in range(40)] for rank in range(2)]
    assert [one["epoch"] for one in own] == [1, 1]
    for first, second in zip(own[0]["steps"], own[1]["steps"], strict=True):
        assert first["samples"] == second["samples"] == 8
        mean = (first["mean"] + second["mean"]) / 2
        assert first["gradient"] == second["gradient"] == pytest.approx(mean, rel=1e-6)
    assert [of_rank["num_measured"] for of_rank in counted] == [80, 80]
    assert [of_rank["measured"]["mean"] for of_rank in counted] == [519.5, 519.5]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (
            "fewer",
            "rank 1 has 39 samples and rank 0 has 40: with mine=True every rank has an equal share of "
            "each step.\nGive all ranks the same number, such as the first 39",
        ),
        (
            "tensors",
            "backward takes a batch of team.loader, or tensors with a row for each sample, and got a tuple; write: "
            "for batch in team.loader(data, batch=64): team.backward(loss, model, batch)",
        ),
        ("not spread", "backward takes what Team.wrap returned, one or a tuple of them, and got Linear"),
        ("no loader", "evaluate takes what Team.loader returned, and got a list"),
        ("no metrics", "metrics returned a Tensor; return a dict of named values: {'accuracy': correct.float()}"),
    ],
)
def test_mistakes_of_a_loop_are_told_alike_on_all_ranks(counted: list[dict[str, Any]], mistake: str, said: str) -> None:
    assert [of_rank[mistake] for of_rank in counted] == [said, said]


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("raising", "2", "sample 7 cannot be read: ZeroDivisionError: division by zero (MY_TASK:"),
        ("dying", "1", "a loader worker died: "),
    ],
)
def test_what_goes_wrong_in_a_loader_worker_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, devices: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(SHARED)
    words = ["train", f"my_task.py:{name}", "--devices", devices, "--workers", "1"]
    done = subprocess.run([sys.executable, "-m", "evenstep", *words], capture_output=True, text=True, timeout=60)
    last = done.stderr[done.stderr.rindex("error:") :]
    assert said.replace("MY_TASK", str(tmp_path / "my_task.py")) in last
    assert len(last.splitlines()) <= 15
    assert done.returncode == 1
