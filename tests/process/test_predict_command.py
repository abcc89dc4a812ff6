"""`evenstep predict`, by its command: a task is measured, more devices are predicted, and Records say what was said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenstep.record import PARTS, Record
from evenstep.report.prediction import Forecast

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from evenstep import Task

x = torch.randn(512, 32)
y = (x[:, :3].sum(1) > 0).long()


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 2)),
        train=(x, y),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=64,
    )
"""
PARAMETERS = 32 * 256 + 256 + 256 * 2 + 2
WITHOUT_TORCH = (
    "import sys; sys.argv = ['evenstep', *sys.argv[1:]]\n"
    "from evenstep.cli import main\n"
    "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
)


def run(*words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "evenstep", *words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def predicted(*words: str, cwd: Path) -> dict[str, Any]:
    return dict(json.loads(run("predict", *words, "--json", cwd=cwd).stdout))


def predicted_without_torch(*words: str, cwd: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "predict", *words, "--json"], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A task that was measured and predicted, and what was printed."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "my_task.py").write_text(TASK)
    done = run("predict", "my_task.py", "--devices", "2,4,16", "--link", "10gbit", "--json", cwd=folder)
    return folder, dict(json.loads(done.stdout))


def test_a_task_is_measured_on_one_and_two_devices_and_predicted_on_more(measured: tuple[Path, dict[str, Any]]) -> None:
    _, found = measured
    seen = [(row["strategy"], row["devices"], row["batch"]) for row in found["rows"] if row["is_measured"]]
    assert seen == [("single", 1, 16), ("single", 1, 64), ("ddp", 2, 64)]
    more = [row for row in found["rows"] if not row["is_measured"]]
    assert [row["devices"] for row in more] == [2, 4, 16]
    for row in more:
        rate = row["samples_per_second"]
        assert rate["low"] < rate["middle"] < rate["high"]
        assert sum(row["parts"].values()) == pytest.approx(row["step_seconds"]["middle"])


def test_where_it_was_measured_the_prediction_is_the_measurement(measured: tuple[Path, dict[str, Any]]) -> None:
    _, found = measured
    both = [
        row["samples_per_second"]["middle"] for row in found["rows"] if (row["strategy"], row["devices"]) == ("ddp", 2)
    ]
    assert len(both) == 2
    assert both[0] == pytest.approx(both[1])


def test_predicted_records_are_read_like_measured_ones(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, found = measured
    record = Record.read(folder / found["folder"] / "ddp-16-predicted")
    assert record.measurement is not None
    assert record.machine["predicted"]
    assert len(record.plan.devices) == 16
    assert set(record.measurement.parts) == set(PARTS)
    assert record.timelines[0].lanes[1].spans


def test_a_page_shows_both_and_report_writes_it_again(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, found = measured
    text = (folder / found["page"]).read_text()
    assert "predicted" in text
    assert "measured" in text
    assert run("report", found["folder"], "--out", "again.html", cwd=folder).stdout.strip() == "again.html"
    assert Forecast.read(folder / found["folder"]).rows


def test_a_comparison_or_its_records_are_enough_without_torch(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, found = measured
    run_folder = str(Path(found["folder"]).parent)
    again = predicted_without_torch(
        run_folder, "--devices", "8,1024", "--link", "25gbit", "--per-device", "64", cwd=folder
    )
    more = [row for row in again["rows"] if not row["is_measured"]]
    assert [(row["devices"], row["batch"]) for row in more] == [(8, 512), (1024, 65536)]
    assert again["knees"][0]["strategy"] == "ddp"


@pytest.mark.slow
def test_a_trained_run_knows_its_gradients_by_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    run("train", "my_task.py", "--strategy", "single", "--epochs", "2", "--name", "mine", "-q", cwd=tmp_path)
    found = predicted(
        "runs/mine", "--devices", "4", "--machines", "4", "--link", "1e-3,1e6", "--price", "2", cwd=tmp_path
    )
    row = found["rows"][-1]
    # Four machines in a ring over a slow link: the bytes of the gradients can be seen in it.
    assert row["parts"]["communication"] == pytest.approx(2 * 3 * (1e-3 + 4 * PARAMETERS / 4 / 1e6), rel=0.5)
    assert row["limit"] == "communication"
    assert row["cost"] == pytest.approx(2 * row["device_hours"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give a task or a run"),
        (("runs/none",), "runs/none"),
        (("runs/typo",), "no file runs/typo; a task is a built-in name"),
        (("runs/typo",), "; a run or a comparison is given as its folder\n"),
        ((".",), ". holds no run; give the folder of a run or of a comparison"),
        (("my_task.py", "--devices", "two"), "--devices is 'two'"),
        (("my_task.py", "--devices", "0"), "--devices is '0'"),
        (("my_task.py", "--link", "fast"), "write 25gbit, nvlink"),
        (("my_task.py", "--gpu", "z9"), "unknown GPU 'z9'"),
        (("my_task.py", "--parameters", "many"), "--parameters is 'many'; write a number such as 25.6M or 7B"),
        (("my_task.py", "--strategies", "dpp"), "unknown strategy 'dpp'"),
        (("my_task.py", "--strategies", ","), "--strategies is ','; name at least one"),
        (("my_task.py", "--machines", "1,2"), "--machines names 2 numbers"),
        (("my_task.py", "--devices", "2", "--machines", "4"), "more than 2 devices"),
        (("my_task.py", "--batch", "8", "--per-device", "8"), "give one of them"),
        (("my_task.py", "--accumulate", "4"), "--accumulate is for strategies that divide a model"),
        (("my_task.py", "--strategies", "pipeline", "--pipeline-schedule", "best"), "unknown schedule 'best'"),
        (("my_task.py", "--strategies", "tensor", "--mesh", "pipeline=2"), "the axes of tensor are data, fsdp"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    done = run("predict", *words, cwd=tmp_path, code=2)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_name_may_be_a_task_or_a_run(tmp_path: Path) -> None:
    done = run("predict", "digit", cwd=tmp_path, code=2)
    assert "no task called 'digit'; did you mean digits?" in done.stderr
    assert done.stderr.endswith("; a run or a comparison is given as its folder\n")


def test_what_cannot_be_predicted_is_left_out_with_its_reason(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, found = measured
    run_folder = str(Path(found["folder"]).parent)
    done = run("predict", run_folder, "--devices", "128", "--link", "10gbit", cwd=folder, code=1)
    assert "a batch of 64 is too small for 128 devices; give --per-device" in done.stdout
    done = run("predict", run_folder, "--devices", "16", "--machines", "8", cwd=folder, code=1)
    assert "say what connects them: --link 25gbit" in done.stdout


def test_models_that_ranks_divide_are_refused_where_nothing_says_how(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, found = measured
    words = (str(Path(found["folder"]).parent), "--devices", "2", "--strategies", "pipeline,tensor")
    done = run("predict", *words, cwd=folder, code=1)
    for name in ("pipeline", "tensor"):
        assert f"{name} x 2 is left out: no run here shows how {name} divides the model" in done.stdout
        assert f"evenstep predict TASK --strategies {name}" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_task_that_ranks_divide_is_looked_at_once_and_then_predicted_without_torch(tmp_path: Path) -> None:
    block = "nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.LayerNorm(256)"
    layers = f"nn.Linear(32, 256), *[nn.Sequential({block}) for _ in range(4)], nn.Linear(256, 2)"
    deep = TASK.replace("nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 2)", layers)
    (tmp_path / "my_task.py").write_text(deep)
    words = ("--strategies", "pipeline,tensor", "--machines", "1")
    found = predicted("my_task.py", *words, "--devices", "2,4,8", cwd=tmp_path)
    measured = [(row["strategy"], row["devices"]) for row in found["rows"] if row["is_measured"]]
    assert measured == [("single", 1), ("single", 1), ("pipeline", 2), ("tensor", 2)]
    rows = {(row["strategy"], row["devices"]): row for row in found["rows"] if not row["is_measured"]}
    assert set(rows) == {("pipeline", 2), ("pipeline", 4), ("tensor", 2), ("tensor", 4), ("tensor", 8)}
    assert "it needs 8 blocks, and the model has 6" in found["left_out"]["pipeline x 8"]
    for row in rows.values():
        assert sum(row["parts"].values()) == pytest.approx(row["step_seconds"]["middle"])
    assert rows["pipeline", 4]["parts"]["bubble"] > 0
    assert rows["tensor", 4]["parts"]["communication"] > 0
    assert "No published table covers pipeline" in found["errors"]
    record = Record.read(tmp_path / found["folder"] / "pipeline-4-predicted")
    assert record.measurement is not None
    assert set(record.measurement.parts) == set(PARTS)
    again = predicted_without_torch(
        str(Path(found["folder"]).parent), *words, "--devices", "4", "--mesh", "pipeline=2", cwd=tmp_path
    )
    notes = [note for note in again["notes"] if note.startswith("pipeline x 4")]
    assert notes[0].startswith("pipeline x 4: 2 replicas of 2 ranks, 8 micro-batches, 1f1b; stages of")


@pytest.mark.parametrize(
    "words",
    [
        ("--precision", "bf16"),
        ("--threads", "1"),
        ("--workers", "0"),
        ("--data", "."),
        ("--seed", "0"),
        ("--out", "elsewhere"),
        ("width=8",),
    ],
)
def test_choices_of_a_measurement_are_refused_for_a_run(
    measured: tuple[Path, dict[str, Any]], words: tuple[str, ...]
) -> None:
    folder, found = measured
    done = run("predict", str(Path(found["folder"]).parent), *words, cwd=folder, code=2)
    assert f"{words[0]} is for a task that is measured" in done.stderr
    assert done.stderr.count("\n") == 1


SEVERAL = """
import torch
from torch import nn
from evenstep import Task

def made():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

def loss_of(key):
    return lambda models, batch: models[key](batch[0]).square().mean()

def task():
    step = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    return Task(
        model=lambda: {"a": made(), "b": made()},
        train=(torch.randn(64, 8),),
        loss={"a": loss_of("a"), "b": loss_of("b")},
        optimizer={"a": step, "b": step},
        batch=16,
    )
"""


def test_a_task_of_several_models_is_measured_and_not_divided(tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text(SEVERAL)
    found = predicted("several.py", "--strategies", "ddp,tensor", "--devices", "2", cwd=tmp_path)
    assert ("ddp", 2, False) in [(row["strategy"], row["devices"], row["is_measured"]) for row in found["rows"]]
    assert "only a task of one model is predicted so" in found["left_out"]["tensor x 2"]


@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=2,tensor=2"])
def test_shards_of_a_split_model_are_not_predicted_as_copies(measured: tuple[Path, dict[str, Any]], mesh: str) -> None:
    folder, found = measured
    words = ("--strategies", "tensor", "--devices", "4", "--mesh", mesh)
    refused = run("predict", str(Path(found["folder"]).parent), *words, cwd=folder, code=2)
    assert "use data in place of fsdp" in refused.stderr


def test_what_a_machine_reads_and_the_number_of_parameters_count(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, found = measured
    words = (str(Path(found["folder"]).parent), "--devices", "4", "--machines", "4", "--link", "1e-3,1e6")
    row = predicted(*words, cwd=folder)["rows"][-1]
    read = predicted(*words, "--reads", "10", cwd=folder)["rows"][-1]
    assert read["step_seconds"]["middle"] > row["step_seconds"]["middle"]
    # A quarter of the 64 samples each, at 10 a second.
    assert read["step_seconds"]["middle"] >= 1.6 * 0.9
    larger = predicted(*words, "--parameters", "1M", cwd=folder)["rows"][-1]
    assert larger["parts"]["communication"] == pytest.approx(2 * 3 * (1e-3 + 1.0), rel=0.5)
    refused = run("predict", *words, "--parameters", "many", cwd=folder, code=2)
    assert "--parameters is 'many'" in refused.stderr
