"""The ways out: the trained model in Python, and files that load where evenstep is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import evenstep as library
from evenstep import Record
from evenstep.errors import BadInput
from tests.process.test_recipes import PAGE
from tests.pure.conftest import Ended, evenstep

__all__ = ["evenstep"]

TITLE = "## Use the trained model elsewhere"
RECIPE = PAGE[PAGE.index(TITLE) :]
(TASK, INFERENCE) = re.findall(r"^```py(?:thon)?\n(.*?)^```", RECIPE, re.DOTALL | re.MULTILINE)[:2]
WITHOUT_EVENSTEP = "import sys; sys.modules['evenstep'] = None\n"
INPUT = torch.arange(40.0).view(2, 20)


@pytest.fixture(autouse=True)
def _task() -> None:
    Path("my_task.py").write_text(TASK)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "evenstep", *words]
    return subprocess.run(run, capture_output=True, text=True, timeout=120)


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", *(pytest.param(name, marks=slow) for name in ("dp", "ddp", "fsdp"))])
def test_the_model_of_a_run_is_the_same_in_python_and_without_evenstep(strategy: str) -> None:
    devices = "cpu" if strategy == "single" else "cpu,cpu"
    trained = command("train", "my_task.py", "--strategy", strategy, "--devices", devices, "--name", "mine", "-q")
    assert trained.returncode == 0, trained.stderr
    for run, to in (("runs/mine", "torch"), ("runs/mine/checkpoints/best", "safetensors")):
        exported = command("checkpoint", "export", run, "--to", to, "exported")
        assert exported.returncode == 0, exported.stderr
        assert [Path(line).is_file() for line in exported.stdout.splitlines()] == [True] * (2 if to == "torch" else 1)
    mask = os.umask(0)
    os.umask(mask)
    files = [path for path in (*Path("runs").rglob("*"), *Path("exported").iterdir()) if path.is_file()]
    assert {path.name for path in files if path.stat().st_mode & 0o777 != 0o666 & ~mask} == set()
    show = "print(model(torch.arange(40.).view(2, 20)).tolist())"
    loads = INFERENCE.replace('torch.load("exported/model.pt")', 'load_file("exported/model.safetensors")')
    for program in (INFERENCE, f"from safetensors.torch import load_file\n{loads}"):
        Path("inference.py").write_text(f"{WITHOUT_EVENSTEP}{program}{show}")
        done = subprocess.run([sys.executable, "inference.py"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        model = Record.read("runs/mine").model("best")
        assert not model.training
        assert torch.tensor(eval(done.stdout.splitlines()[-1])) == pytest.approx(model(INPUT).detach(), rel=1e-5)


def test_an_export_has_a_model_card_made_of_the_record(evenstep: Callable[..., Ended]) -> None:
    trained = library.train("my_task.py", name="mine", devices="cpu", epochs=2, audit=True, progress=False)
    assert evenstep("checkpoint", "export", "runs/mine", "--to", "torch", "exported").code == 0
    card = Path("exported/README.md").read_text()
    assert card.startswith("---\nlibrary_name: pytorch\ntags:\n- evenstep\n---\n\n# mine\n")
    for words in (
        "| checkpoint | step 10, after 600 samples |",
        "| seed of weights and sample order | 0 |",
        "| strategy | single on cpu |",
        f"| loss | {trained.evaluations[-1].values['loss']:.6g} |",
        "Samples that the training used: 300 samples x 2 epochs, 0 repeated, 0 missed.",
        'torch.load("model.pt", weights_only=True)',
        "evenstep train my_task.py --batch 64 --epochs 2 --seed 0 --precision fp32",
    ):
        assert words in card
    assert str(Path.cwd()) not in card, "a path of this machine"
    # A second export, or the user's own card, is left alone.
    Path("exported/README.md").write_text("mine")
    assert evenstep("checkpoint", "export", "runs/mine", "--to", "safetensors", "exported").code == 0
    assert Path("exported/README.md").read_text() == "mine"


@pytest.mark.slow
def test_the_best_model_may_be_one_of_the_run_before() -> None:
    choices = {"best": "loss:max", "progress": False}
    before = library.train("my_task.py", name="before", epochs=1, **choices)
    later = library.train("my_task.py", name="later", epochs=2, resume="runs/before", **choices)
    assert later.summary is not None
    assert later.summary.best is not None
    assert later.summary.best.checkpoint.startswith("runs/before")
    ours, theirs = later.model("best").state_dict(), before.model("best").state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_an_average_of_the_weights_goes_out_where_there_is_one() -> None:
    Path("my_task.py").write_text(TASK.replace("return Task(", "return Task(ema=0.9, ", 1))
    assert command("train", "my_task.py", "--name", "mine", "-q").returncode == 0
    assert command("checkpoint", "export", "runs/mine", "exported", "--to", "safetensors").returncode == 0
    latest = Path("runs/mine/checkpoints/latest")
    average, weights = load_file(latest / "ema.safetensors"), load_file(latest / "weights.safetensors")
    for tensors in (load_file("exported/model.safetensors"), Record.read("runs/mine").model().state_dict()):
        assert all(torch.equal(tensors[name], value) for name, value in average.items())
        assert not torch.equal(tensors["1.weight"], weights["1.weight"])


def test_the_checkpoint_of_a_custom_loop_is_exported_too(evenstep: Callable[..., Ended]) -> None:
    team = library.join("single", devices=("cpu",))
    model = team.wrap(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    library.Run(team, model, optimizer, team.loader(torch.zeros(4, 2), batch=2)).save("mine")
    assert evenstep("checkpoint", "export", "mine", "exported", "--to", "torch").code == 0
    assert torch.equal(torch.load("exported/model.pt")["weight"], model.module.weight)
    refused = evenstep("checkpoint", "export", "mine", "hf", "--to", "hf")
    assert "does not name the task that it is from" in refused.err
    assert "--to hf --task TASK" in refused.err


@pytest.mark.slow
def test_several_models_come_back_by_name(evenstep: Callable[..., Ended]) -> None:
    recipe = PAGE[PAGE.index("## A GAN: several models") :]
    Path("my_task.py").write_text(recipe.split("```python\n", 1)[1].split("```", 1)[0])
    assert command("train", "my_task.py", "--steps", "2", "--name", "mine", "-q").returncode == 0
    assert evenstep("checkpoint", "export", "runs/mine", "exported", "--to", "torch").code == 0
    models, exported = Record.read("runs/mine").model(), torch.load("exported/model.pt")
    assert {f"{key}.{name}" for key, model in models.items() for name in model.state_dict()} == exported.keys()
    assert torch.equal(models["g"].state_dict()["0.weight"], exported["g.0.weight"])


HF = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from evenstep import Task

tokens = torch.randint(0, 50, (16, 8))

def task() -> Task:
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    return Task(
        model=lambda: GPT2LMHeadModel(config),
        train=(tokens,),
        loss=lambda model, batch: model(batch[0], labels=batch[0]).loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


@pytest.mark.slow
def test_a_hugging_face_model_becomes_a_folder_for_from_pretrained() -> None:
    Path("my_task.py").write_text(HF)
    assert command("train", "my_task.py", "--steps", "2", "--batch", "8", "--name", "mine").returncode == 0
    exported = command("checkpoint", "export", "runs/mine", "gpt", "--to", "hf")
    assert exported.returncode == 0, exported.stderr
    from transformers import GPT2LMHeadModel

    loaded = GPT2LMHeadModel.from_pretrained("gpt")
    tokens = torch.arange(8).view(1, 8)
    assert torch.equal(loaded(tokens).logits, Record.read("runs/mine").model()(tokens).logits)
    assert (Path("gpt") / "config.json").stat().st_mode & 0o044
    card = Path("gpt/README.md").read_text()
    assert "library_name: transformers" in card
    (use,) = re.findall(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
    program = f"{WITHOUT_EVENSTEP}{use.replace('path/of/this/folder', 'gpt')}\nprint(type(model).__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["GPT2LMHeadModel"], done.stderr


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused_in_one_line(evenstep: Callable[..., Ended], tmp_path: Path) -> None:
    assert command("train", "my_task.py", "--steps", "1", "--name", "mine").returncode == 0
    assert command("checkpoint", "export", "runs/mine", "out", "--to", "torch").returncode == 0
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    for words, said in {
        ("runs/mine", "out", "--to", "torch"): "out/model.pt exists; choose another folder, or remove it",
        ("runs/mine", "out", "--to", "onnx"): "unknown format 'onnx'; choose safetensors, torch or hf",
        ("runs/mine", "out", "--to", "hf"): "the model is a Sequential, which has no save_pretrained",
        ("runs", "out", "--to", "torch"): "runs is neither a checkpoint nor a run folder with one",
        ("runs/mine", "my_task.py", "--to", "torch"): "my_task.py cannot be written",
    }.items():
        ended = evenstep("checkpoint", "export", *words)
        assert (ended.code, said in ended.err) == (2, True), ended
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before
    assert sorted(os.listdir()) == ["my_task.py", "out", "runs"]


@pytest.mark.slow
def test_a_task_outside_the_working_folder_is_imported_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("train", "my_task.py", "--steps", "1", "--name", "mine").returncode == 0
    Path("beside").mkdir()
    monkeypatch.chdir("beside")
    record = Record.read("../runs/mine")
    with pytest.raises(BadInput, match=r"which is not in this folder: .*\n.*record\.model\(task=\.\.\.\)"):
        record.model()
    model = record.model("step-00000001", task="../my_task.py")
    assert model.state_dict().keys() == load_file("../runs/mine/checkpoints/latest/weights.safetensors").keys()
