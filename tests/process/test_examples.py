"""Every example runs, as its first lines say."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import evenstep
from evenstep.record import Record

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str | Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(*arguments: str | Path) -> str:
    return run(sys.executable, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        pytest.param((sys.executable,), id="alone", marks=pytest.mark.slow),
        pytest.param((sys.executable, "-m", "evenstep", "run", "--devices", "2"), id="evenstep"),
        pytest.param(
            (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            id="torchrun",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_own_loop_runs_alone_under_evenstep_and_under_torchrun(start: tuple[str, ...]) -> None:
    said = run(*start, EXAMPLES / "own_loop.py")
    radius = re.search(r"mean radius (\d\.\d+)", said)
    assert radius is not None, said
    assert 0.85 < float(radius.group(1)) < 1.15


def test_own_loop_is_under_40_lines() -> None:
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) < 40


@pytest.fixture
def digits_as_mnist(tmp_path: Path) -> Path:
    """Pictures that can be told apart, in MNIST's own format."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    random = np.random.default_rng(0)
    for split, num in (("train", 1000), ("t10k", 200)):
        labels = random.integers(0, 10, num).astype(np.uint8)
        pictures = random.integers(0, 120, (num, 28, 28)).astype(np.uint8)
        pictures[np.arange(num), 2 * labels] = 255
        header = np.array([0x803, num, 28, 28], ">i4").tobytes()
        write_gz(folder / f"{split}-images-idx3-ubyte.gz", header + pictures.tobytes())
        header = np.array([0x801, num], ">i4").tobytes()
        write_gz(folder / f"{split}-labels-idx1-ubyte.gz", header + labels.tobytes())
    return folder


def write_gz(path: Path, content: bytes) -> None:
    path.write_bytes(gzip.compress(content))


@pytest.mark.slow
def test_mnist_trains_from_the_command_and_from_python(digits_as_mnist: Path) -> None:
    python("-m", "evenstep", "train", EXAMPLES / "mnist.py", "--data", digits_as_mnist, "--name", "command")
    said = python(EXAMPLES / "mnist.py", digits_as_mnist)
    command, script = Record.read("runs/command"), Record.read(next(Path("runs").glob("*-ddp")))
    assert script.plan.devices == ("cpu", "cpu")
    assert script.losses == pytest.approx(command.losses, rel=1e-4)
    assert command.summary is not None
    assert command.summary.valid["accuracy"] > 0.9
    assert "accuracy" in said


@pytest.mark.slow
def test_cifar10_sees_the_same_flips_on_one_device_and_on_two(tmp_path: Path) -> None:
    folder = tmp_path / "cifar"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        records = random.integers(0, 256, (64, 3073)).astype(np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)
    command = ("-m", "evenstep", "train", EXAMPLES / "cifar10.py", "--data", folder, "--batch", "16", "--steps", "6")
    python(*command, "--name", "one")
    python(*command, "--name", "two", "--strategy", "dp", "--devices", "2")
    assert Record.read("runs/two").losses == pytest.approx(Record.read("runs/one").losses, rel=1e-5)


@pytest.mark.slow
def test_imbalanced_digits_are_learned_better_when_balanced() -> None:
    said = python(EXAMPLES / "imbalanced.py")
    found = re.findall(r"^(\w+) +(\d+) steps  loss [\d.]+  accuracy ([\d.]+)  of rare digits ([\d.]+)$", said, re.M)
    (plain, plain_steps, *as_they_come), (balanced, balanced_steps, *evened_out) = found
    assert (plain, balanced) == ("plain", "balanced")
    assert plain_steps == balanced_steps
    # Over ten seeds, the smallest gain was 0.08 in all and 0.16 on the rare digits.
    assert float(evened_out[0]) > float(as_they_come[0]) + 0.05
    assert float(evened_out[1]) > float(as_they_come[1]) + 0.10


@pytest.mark.slow
def test_imbalanced_digits_are_balanced_alike_on_one_device_and_on_two() -> None:
    task = f"{EXAMPLES / 'imbalanced.py'}:balanced"
    python("-m", "evenstep", "train", task, "--strategy", "ddp", "--devices", "2", "--steps", "14", "--name", "two")
    one = evenstep.train(task, steps=14, threads=1, progress=False)  # an epoch has 12
    assert Record.read("runs/two").losses == pytest.approx(one.losses, rel=1e-4)


@pytest.mark.slow
def test_curriculum_keeps_its_pace_and_shows_it_in_the_record() -> None:
    said = python(EXAMPLES / "curriculum.py")
    record = Record.read(next(Path("runs").iterdir()))
    promised = [round(part * 1438) for part in (0.3, 0.6, 0.8, 1, 1)]
    for epoch, length in enumerate(promised):
        steps = [step for step in record.steps if step.epoch == epoch]
        assert {step.epoch_samples for step in steps} == {length}
        assert sum(step.samples for step in steps) == length
        assert f"epoch {epoch + 1}: {length} of 1438 samples" in said
    assert {step.epoch for step in record.steps} == set(range(5))
    assert record.summary is not None
    assert record.summary.valid["accuracy"] > 0.85


@pytest.mark.slow
def test_demo_shows_four_strategies_that_learned_the_same_and_ends_with_the_page() -> None:
    said = python(EXAMPLES / "demo.py")
    rows = {line.split()[0]: line for line in said.splitlines() if re.match(r"(single|dp|ddp|fsdp) +train loss", line)}
    assert list(rows) == ["single", "dp", "ddp", "fsdp"]
    (page,) = Path("runs").glob("*-compare/page.html")
    assert said.splitlines()[-1] == f"page  {page}"
    assert said.count("✓ same") == 3
    runs = [path for path in sorted(Path("runs").iterdir()) if path != page.parent]
    summaries = [Record.read(path).summary for path in runs]
    assert len(summaries) == 4
    for summary in summaries:
        assert summary is not None
        assert summary.valid["accuracy"] >= 0.96
        assert f"{summary.train_loss:.4f}" in rows[summary.strategy]
    assert len({round(summary.valid["accuracy"], 9) for summary in summaries if summary}) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(tmp_path)}}).execute()
    difference = float(notebook.cells[-1].outputs[0].data["text/plain"])
    assert difference < 1e-5
