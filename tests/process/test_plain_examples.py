"""The programs of the tutorials, and the page that leads away from them, do what they say."""

from __future__ import annotations

import gzip
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "examples" / "plain"
PAGE = ROOT / "docs" / "from-plain-torch.md"
PROGRAMS = {"single.py": (), "data_parallel.py": (), "distributed.py": ("--world-size", "2")}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    # No GPUs: the tests are about the programs, and must mean the same on a machine that has one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=60)


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=pytest.mark.slow if name != "distributed.py" else ()) for name in PROGRAMS]
)
def test_learns_in_one_epoch_and_saves_weights_with_their_own_names(program: str) -> None:
    done = python("-W", "error", str(PLAIN / program), "--epochs", "1", *PROGRAMS[program])
    assert done.returncode == 0, done.stderr
    word, value = done.stdout.splitlines()[-1].split()
    assert word == "accuracy"
    assert 0.95 < float(value) <= 1
    names = list(torch.load("simple_net.pt", weights_only=True))
    assert names == ["hidden.weight", "hidden.bias", "output.weight", "output.bias"]


def test_reads_the_files_of_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path, num=20)
    for images, labels in (part.tensors for part in runpy.run_path(str(PLAIN / "single.py"))["load_data"](tmp_path)):
        assert labels.tolist() == [*range(10), *range(10)]
        assert images.view(20, 28, 28).mean(2).argmax(1).equal(labels)
        assert images.unique().tolist() == pytest.approx([-0.1307 / 0.3081, 0.8693 / 0.3081])


def write_mnist(folder: Path, num: int) -> None:
    """Pictures of which a single bright row tells the class."""
    for part in ("train", "t10k"):
        labels = bytes(index % 10 for index in range(num))
        rows = (bytes(255 if row == label else 0 for row in range(28) for _ in range(28)) for label in labels)
        sizes = b"".join(size.to_bytes(4, "big") for size in (num, 28, 28))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(b"\0\0\x08\x03" + sizes + b"".join(rows), compresslevel=1)
        )
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(b"\0\0\x08\x01" + sizes[:4] + labels, compresslevel=1)
        )


def test_the_task_file_of_the_page_trains_on_two_processes(tmp_path: Path) -> None:
    task_file = tmp_path / "my_task.py"
    task_file.write_text(code_blocks(PAGE)[0])
    done = python(
        "-m", "evenstep", "train", "my_task.py", "--strategy", "ddp", "--devices", "2", "--steps", "5", "--json"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 5
    assert 0 < summary["valid"]["accuracy"] <= 1


@pytest.mark.slow
def test_the_loop_of_the_page_trains(tmp_path: Path) -> None:
    task, *_, loop = code_blocks(PAGE)
    given = """
from pathlib import Path
import evenstep

chosen = task()
(images, labels), loss, SimpleNet = chosen.train, chosen.loss, chosen.model
"""
    steps = []
    for epochs in (1, 2):  # the second time it goes on from its own checkpoint
        (tmp_path / "my_loop.py").write_text(
            task + given + loop.replace("loader.epoch < 5", f"loader.epoch < {epochs}")
        )
        steps.append(runpy.run_path("my_loop.py")["run"].step)
    assert steps[1] == 2 * steps[0] > 0
    assert Path("checkpoints/latest/weights.safetensors").is_file()
