"""Whatever cannot run is refused in one or two lines with the next step, before anything is started."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import evenstep as library
from evenstep.checkpoint import files
from evenstep.cli.app import _print_error
from evenstep.errors import shorten
from tests.pure.conftest import Ended

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset
from evenstep import Task

x = torch.arange(80.0).reshape(20, 4) / 80
y = torch.arange(20) % 2

class Samples(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, id_):
        return (x[id_], y[id_]) if id_ < 19 else (x[id_, :3], y[id_])

class NoLength(Dataset):
    def __getitem__(self, id_):
        return x[id_], y[id_]

def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def task() -> Task:
    return Task(
        model=lambda: MODEL,
        train=TRAIN,
        loss=lambda model, batch: LOSS,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch=5,
    )
"""


def task_text(model: str = "nn.Linear(4, 2)", train: str = "(x, y)", loss: str = "mean(model, batch)") -> str:
    return TASK.replace("MODEL", model).replace("TRAIN", train).replace("LOSS", loss)


def write_task(**parts: str) -> None:
    Path("my_task.py").write_text(task_text(**parts))


Refused = Callable[..., str]


@pytest.fixture
def refused(evenstep: Callable[..., Ended]) -> Refused:
    """`refused("train", "x")` is the message, after checking that it is short and that nothing was started."""

    def command(*arguments: object) -> str:
        processes, folders = psutil.Process().children(), sorted(Path().rglob("runs/*"))
        ended = evenstep(*arguments)
        assert ended.code == 2, ended.err
        assert ended.out == ""
        assert ended.err.startswith("error: ")
        assert "Traceback" not in ended.err
        assert 1 <= len(ended.err.strip().splitlines()) <= 2
        assert sorted(Path().rglob("runs/*")) == folders
        assert psutil.Process().children() == processes
        return ended.err.removeprefix("error: ").strip()

    return command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train", ["no task given; try: evenstep train digits"]),
        ("train digit", ["no task called 'digit'; did you mean digits? Built in are digits,", "file.py:function"]),
        ("train some/folder", ["no file some/folder", "a Python file of yours"]),
        ("train gone.py", ["no file gone.py", "a Python file of yours"]),
        ("train nothing.py", ["no file nothing.py", "a Python file of yours"]),
        ("train my_taks.py", ["no file my_taks.py; did you mean my_task.py?"]),
        ("train my_task.py:other", ["my_task.py has no 'other'; it has task"]),
        ("train my_task.py:", ["'my_task.py:' names no function; choose from my_task.py:task"]),
        ("train my_task.py --strategy dpp", ["unknown strategy 'dpp'; choose single", "; did you mean d"]),
        ("train my_task.py --strategy simple", ["unknown strategy 'simple'", "; did you mean single?"]),
        ("train my_task.py --devices gpu", ["unknown device 'gpu'; write cpu, mps or cuda:0"]),
        ("train my_task.py --on k8s", ["--on is 'k8s'; the only choice is ray"]),
        ("train my_task.py --on ray --machines 2", ["with --on ray, Ray chooses the machines; leave out --machines"]),
        ("train my_task.py --resume auto", ["--resume auto continues the run that --name names; give a --name"]),
        ("train my_task.py --devices cpu,tpu", ["unknown device 'tpu'; write cpu, mps or cuda:0"]),
        ("train my_task.py --precision fp23", ["precision is 'fp23'; choose fp64", "; did you mean"]),
        (
            "train my_task.py --precision tf32 --devices cpu",
            ["tf32 exists on CUDA devices only", "use --precision fp32 or bf16"],
        ),
        ("train my_task.py --batch 0", ["batch is 0; it must be a whole number, 1 or more"]),
        ("train my_task.py --batch -3", ["batch is -3; it must be a whole number, 1 or more"]),
        (
            "train my_task.py --batch 21",
            ["a global batch of 21 is larger than the 20 training", "use --batch 20 or less"],
        ),
        ("train my_task.py --batch five", ["--batch is 'five'", "see evenstep train --help"]),
        (
            "train my_task.py --devices cpu,cpu --accumulate 3",
            ["a global batch of 5 is too small for 2 devices x 3 micro-batches; use --batch 6 or more"],
        ),
        ("train my_task.py --devices cuda:7", ["device cuda:7 does not exist: this machine has", "use --devices cpu"]),
        ("train my_task.py --devices 10000", ["10000", "use --devices "]),
        ("train my_task.py --devices 99999999999999999999", ["99999999999999999999", "use --devices "]),
        ("train my_task.py --devices 0", ["0 devices were requested; give 1 or more"]),
        ("train my_task.py --devices cpu,cpu --strategy single", ["single runs on one device and 2", "--strategy dp"]),
        ("train my_task.py --epochs 1 --steps 1", ["exclude each other; give one of them"]),
        ("train my_task.py --steps 0", ["steps is 0; it must be a whole number, 1 or more"]),
        ("train my_task.py --seed -1", ["seed is -1; it must be from 0 to 2**63 - 1"]),
        ("train my_task.py --name a/b", ["'a/b' cannot name a run; use letters, digits"]),
        ("train my_task.py --name .hidden", ["'.hidden' cannot name a run; use letters, digits"]),
        ("train my_task.py --name ..", ["'..' cannot name a run; use letters, digits"]),
        ("train my_task.py --name a..b", ["'a..b' cannot name a run; use letters, digits"]),
        ("train my_task.py --wrong", ["No such option: --wrong", "see evenstep train --help"]),
        ("train my_task.py --strategy", ["--strategy", "requires an argument; see evenstep "]),
        ("train my_task.py more", ["more is not an option of the task; write NAME=VALUE"]),
        ("tarin my_task.py", ["No such command 'tarin'", "--help"]),
        ("train my_task.py --resume runs/gone", ["runs/gone does not exist; give a run folder"]),
        ("train my_task.py --resume gone.pt", ["gone.pt does not exist; give a run folder"]),
        (
            "train my_task.py --resume .",
            [". is neither a checkpoint nor a run folder with one"],
        ),
        ("train --plan gone.json", ["gone.json does not exist", "give the plan.json of a run folder"]),
        ("train --plan my_task.py", ["my_task.py is not a plan", "give the plan.json of a run folder"]),
        ("checkpoint inspect gone", ["gone does not exist; give a run folder"]),
        ("run gone.py", ["gone.py does not exist; write: evenstep run"]),
        ("run --devices 0 my_task.py", ["0 devices were requested; give 1 or more"]),
        ("run --nproc-per-node two my_task.py", ["--devices is 'two'; write a number such as 2, or gpu, cpu or auto"]),
        (
            "run --log_dir=5 my_task.py",
            ["no option --log_dir; write --out DIR: each rank's output is in a folder below"],
        ),
        ("run --rdzv_backend etcd my_task.py", ["--rdzv-backend etcd: machines use torch's c10d rendezvous; omit it"]),
        ("run --nnodes 2 my_task.py", ["--machines and --rendezvous go together"]),
        ("run --lr 0.1 my_task.py", ["no option --lr; see evenstep run --help"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_command_is_refused(refused: Refused, arguments: str, said: list[str]) -> None:
    write_task()
    message = refused(*arguments.split())
    for part in said:
        assert part in message


@pytest.mark.parametrize("arguments", [[], ["checkpoint"]])
def test_a_command_without_arguments_shows_its_help(evenstep: Callable[..., Ended], arguments: list[str]) -> None:
    ended = evenstep(*arguments)
    assert ended.code == 2
    assert ended.err == ""
    assert "Usage: evenstep" in ended.out


def test_a_message_is_printed_as_it_is(refused: Refused) -> None:
    assert refused("train", "[bold]:100:") == (
        "module [bold] cannot be imported: ModuleNotFoundError: No module named '[bold]'"
    )
    assert refused("train", "[bold]:\x1b[31m") == (
        r"'[bold]:\x1b[31m' on the command line holds a control character, or bytes that are not UTF-8"
    )
    assert refused("train", "digits", "--resume", "a:100:b").startswith("a:100:b does not exist")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import nowhere",
            ["my_task.py cannot be imported: ModuleNotFoundError: No module named 'nowhere'", "_task.py:1)"],
        ),
        ("def task(:", ["my_task.py cannot be imported: SyntaxError", "my_task.py, line 1)"]),
        ("raise ValueError('one\\ntwo\\nthree')", ["my_task.py cannot be imported: ValueError: one two three"]),
        ("exit()", ["my_task.py cannot be imported: SystemExit"]),
        (
            "x = 1",
            ["my_task.py has no task; if it has a training loop: evenstep run --devices 2 my_task.py; else"],
        ),
        (
            "from evenstep import Task\ndef a() -> Task: ...\ndef b() -> Task: ...",
            ["my_task.py has 2 tasks: a, b; choose one with my_task.py:a"],
        ),
        ("def task(): return 1", ["task() returned int, not a Task; end it with: return Task(...)"]),
        ("def task(): return open('gone.csv')", ["task() does not make its Task: FileNotFoundError", "my_task.py:1)"]),
    ],
    ids=["import", "syntax", "raises", "exits", "none", "two", "other", "fails"],
)
def test_a_file_without_one_task_is_refused(refused: Refused, text: str, said: list[str]) -> None:
    Path("my_task.py").write_text(text)
    message = refused("train", "my_task.py")
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"train": "[]"}, ["the train data is empty; it needs at least one sample"]),
        ({"train": "(x[:0], y[:0])"}, ["the train data is empty; it needs at least one sample"]),
        ({"train": "NoLength()"}, ["the train data (NoLength) has no length; give it a __len__"]),
        (
            {"train": "iter([1, 2])"},
            ["the train data is an iterator (list_iterator), which can be iterated over only once; give an object"],
        ),
        ({"train": "Samples()"}, ["sample 0 is ((4,), ()) and sample 19 is ((3,), ())", "give the Task a collate"]),
        ({"train": "(x, y[:7])"}, ["the train data has columns of [20, 7] samples; all need the same number"]),
        ({"train": "None"}, ["the train data is a NoneType; give a dataset"]),
        (
            {"train": "torch.utils.data.DistributedSampler(x)"},
            ["the train data is a DistributedSampler, not a dataset; give the dataset, and pass the sampler as"],
        ),
        (
            {"train": "(x[torch.distributed.get_rank() :],)"},
            ["A task needs no process group, and there is none while it is made: give the whole data", "my_task.py:"],
        ),
        (
            {"model": "nn.Linear(10**6, 10**6)"},
            ["the model does not fit: weights and gradients need 7450", "smaller model"],
        ),
        ({"model": "'a model'"}, ["Task.model() returned str; it must return a torch.nn.Module"]),
        ({"model": "None"}, ["Task.model() returned NoneType; it must return a torch.nn.Module"]),
        ({"loss": "model(batch[0])"}, ["the loss has shape (4, 2); it must be one number: its mean, or a pair"]),
        ({"loss": "mean(model, batch).detach()"}, ["the loss has no gradient; it must depend on the model's"]),
        ({"loss": "mean(model, batch).item()"}, ["the loss is a float; return a tensor: the mean over the batch"]),
        ({"loss": "None"}, ["the loss is a NoneType; return a tensor: the mean over the batch"]),
        ({"loss": "(mean(model, batch), 1, 2)"}, ["loss returned 3 values; return a mean, or a pair (sum, count)"]),
        ({"loss": "()"}, ["loss returned 0 values; return a mean, or a pair (sum, count)"]),
        ({"loss": "(mean(model, batch), batch[1])"}, ["the count of loss has shape (4,); it is one number"]),
        ({"loss": "(mean(model, batch), None)"}, ["the count of loss is a NoneType; it is one number"]),
        ({"loss": "1 / 0"}, ["the loss cannot be computed: ZeroDivisionError", "my_task.py:"]),
        ({"model": "nn.Linear(5, 2)"}, ["the loss cannot be computed: RuntimeError: ", "shapes", "my_task.py:"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else "-".join(value.values()),
)
def test_a_task_that_cannot_be_trained_is_refused(refused: Refused, parts: dict[str, str], said: list[str]) -> None:
    write_task(**parts)
    message = refused("train", "my_task.py")
    for part in said:
        assert part in message


def test_a_run_needs_a_folder_to_write_into(refused: Refused) -> None:
    write_task()
    Path("runs").write_text("this is a file")
    assert refused("train", "my_task.py") == (
        "runs is a file, and runs need a folder of that name; move the file, or give another --out"
    )


def test_a_run_does_not_write_over_another(refused: Refused) -> None:
    write_task()
    Path("runs/first").mkdir(parents=True)
    assert "runs/first exists; choose another --name, or continue it" in refused(
        "train", "my_task.py", "--name", "first"
    )


def test_the_api_raises_what_the_command_says() -> None:
    with pytest.raises(library.EvenstepError, match=r"unknown devcies; did you mean devices\?"):
        library.train("digits", devcies=2)
    with pytest.raises(library.EvenstepError, match="unknown lr, zz; train takes batch, strategy"):
        library.train("digits", zz=1, lr=0.1)
    with pytest.raises(library.EvenstepError, match="unknown strategy 'dpp'"):
        library.train("digits", strategy="dpp")
    assert not Path("runs").exists()


# Checkpoints.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder):
        write_task()
        library.train("my_task.py", steps=2, name="first", progress=False)
    return folder / "runs" / "first"


@pytest.fixture
def run(trained: Path) -> Path:
    """A copy of that run, to be damaged."""
    write_task()
    shutil.copytree(trained, "runs/first", symlinks=True)
    return Path("runs/first")


def rewrite(run: Path, name: str, content: bytes) -> None:
    """Change a file of the only checkpoint, and its sum with it."""
    path = run / "checkpoints" / "step-00000002"
    (path / name).write_bytes(content)
    sums = [line.split("  ")[1] for line in (path / files.SUMS).read_text().splitlines()]
    lines = (f"{hashlib.sha256((path / file).read_bytes()).hexdigest()}  {file}\n" for file in sums)
    (path / files.SUMS).write_text("".join(lines))


def resume(run: Path) -> list[str]:
    return ["train", "my_task.py", "--resume", str(run), "--steps", "4"]


def test_the_run_goes_on_if_it_is_left_as_it_is(run: Path, evenstep: Callable[..., Ended]) -> None:
    ended = evenstep(*resume(run), "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["steps"] == 2


def test_another_learning_rate_in_the_task_is_said_with_what_to_do(run: Path, evenstep: Callable[..., Ended]) -> None:
    task = Path("my_task.py")
    task.write_text(task.read_text().replace("lr=0.0", "lr=0.5"))
    ended = evenstep(*resume(run))
    assert ended.code == 0, ended.err
    assert "the checkpoint's learning rate, 0.0, is kept; the one of this task's optimizer, 0.5, is not used" in (
        ended.err
    )
    assert f"--resume {run.resolve()}/checkpoints/step-00000002/weights.safetensors" in ended.err


def test_a_run_cannot_go_on_under_its_own_name_and_is_not_advised_to(run: Path, refused: Refused) -> None:
    for name in (run, run / "checkpoints", run / "checkpoints" / "latest"):
        assert refused("train", "my_task.py", "--resume", name, "--name", "first", "--steps", "4") == (
            "runs/first is the run given to --resume, and the new run needs its own folder: "
            "omit --name, or choose another"
        )


def test_a_truncated_checkpoint_is_refused(run: Path, refused: Refused) -> None:
    os.truncate(run / "checkpoints" / "latest" / files.WEIGHTS, 50)
    message = refused(*resume(run))
    assert "no intact checkpoint in runs/first" in message
    assert "step-00000002 is damaged: weights.safetensors is not what was written" in message


def test_a_folder_that_is_no_checkpoint_is_refused(refused: Refused) -> None:
    write_task()
    Path("folder").mkdir()
    assert "folder is neither a checkpoint nor a run folder with one" in refused(*resume(Path("folder")))
    Path("folder/state.json").write_text("{}")
    assert "folder is not a checkpoint: its SHA256SUMS cannot be read" in refused(*resume(Path("folder")))


@pytest.mark.parametrize("where", ["", "checkpoints/latest"])
def test_a_checkpoint_of_a_newer_version_is_refused(run: Path, refused: Refused, where: str) -> None:
    state = json.loads((run / "checkpoints/latest/state.json").read_text())
    newer = json.dumps({**state, "format": 7, "evenstep": "3.1"}).encode()
    rewrite(run, files.STATE, newer)
    message = refused(*resume(run / where))
    assert "has format 7 and this evenstep reads up to 1; it was written by evenstep 3.1: upgrade to load it" in message


def test_a_checkpoint_of_another_model_is_refused_with_the_first_differences(run: Path, refused: Refused) -> None:
    write_task(model="nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))")
    message = refused(*resume(run))
    assert "is from another model: missing keys: 0.weight, 0.bias, 1.weight and 1 more" in message
    assert "unexpected keys: weight, bias" in message or "unexpected keys: bias, weight" in message
    write_task(model="nn.Linear(4, 3)")
    message = refused(*resume(run))
    assert (
        "is from another model: weight has shape (2, 4) instead of (3, 4), bias has shape (2,) instead of (3,)"
        in message
    )
    assert "Nothing was loaded; use the task that wrote it" in message


def test_a_checkpoint_of_other_data_or_another_seed_is_refused(run: Path, refused: Refused) -> None:
    assert "was trained with seed 0 and the seed is now 5" in refused(*resume(run), "--seed", "5")
    write_task(train="(x[:19], y[:19])")
    message = refused(*resume(run))
    assert "was trained on 20 samples and the data now has 19" in message
    assert "Use the data, seed and order that it was trained with, or start from its weights: --resume " in message


def test_a_finished_run_is_not_resumed(run: Path, refused: Refused) -> None:
    assert "there is nothing left to do; give a larger --epochs or --steps" in refused(
        "train", "my_task.py", "--resume", run
    )


# Files of weights that others made.

WEIGHTS = {"weight": torch.arange(8.0).reshape(2, 4), "bias": torch.tensor([1.0, -1.0])}


class Malicious:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it-ran",)


def from_file(path: str, *more: str) -> list[str]:
    return ["train", "my_task.py", "--steps", "2", "--name", "resumed", "--resume", path, *more]


def resumed_weights() -> dict[str, torch.Tensor]:
    return load_file("runs/resumed/checkpoints/latest/weights.safetensors")


def check_loaded(ended: Ended) -> None:
    assert ended.code == 0, ended.err
    # The learning rate is zero: what was loaded is what is saved.
    assert all(torch.equal(value, WEIGHTS[name]) for name, value in resumed_weights().items())


@pytest.mark.parametrize("old_format", [False, True])
def test_a_malicious_pickle_does_not_run(refused: Refused, old_format: bool) -> None:
    write_task()
    content = {**WEIGHTS, "more": Malicious()}
    torch.save(content, "evil.pt", _use_new_zipfile_serialization=not old_format)
    message = refused(*from_file("evil.pt"))
    assert "evil.pt holds Python objects, which can run code when loaded" in message
    assert "Ask for a .safetensors file, or, if you trust it, add --allow-pickle" in message
    assert not Path("it-ran").exists()


def test_a_malicious_pickle_does_not_run_by_another_ending(refused: Refused) -> None:
    write_task()
    for name in ("evil.safetensors", "evil.bin"):
        Path(name).write_bytes(pickle.dumps(Malicious(), protocol=2))
        assert name in refused(*from_file(name))
        assert not Path("it-ran").exists()


def test_allow_pickle_loads_what_the_user_trusts(evenstep: Callable[..., Ended], refused: Refused) -> None:
    write_task()
    model = nn.Linear(4, 2)
    model.load_state_dict(WEIGHTS)
    torch.save(model, "whole.pt")
    assert "add --allow-pickle" in refused(*from_file("whole.pt"))
    check_loaded(evenstep(*from_file("whole.pt", "--allow-pickle")))


def test_allow_pickle_does_not_load_what_is_no_table_of_tensors(refused: Refused) -> None:
    write_task()
    torch.save({"learning": 1, "rate": [2]}, "plain.pt")
    for more in ([], ["--allow-pickle"]):
        message = refused(*from_file("plain.pt", *more))
        assert "plain.pt holds no state_dict; save one with torch.save(model.state_dict(), ...)" in message


@pytest.mark.parametrize("more", [[], ["--allow-pickle"]], ids=["", "--allow-pickle"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.pt", b""),
        ("words.pt", b"hello there\n"),
        ("noise.pt", bytes(range(255, 0, -1))),
        ("zip.pt", b"PK\x05\x06" + bytes(18)),
        ("empty.safetensors", b""),
        ("words.safetensors", b"hello there, this is no header at all"),
    ],
)
def test_a_file_that_holds_no_weights_is_refused(refused: Refused, name: str, content: bytes, more: list[str]) -> None:
    write_task()
    Path(name).write_bytes(content)
    message = refused(*from_file(name, *more))
    assert f"{name} is not a weights file" in message
    assert "give a .safetensors file" in message


def test_a_truncated_file_of_weights_is_refused(refused: Refused) -> None:
    write_task()
    torch.save(WEIGHTS, "weights.pt")
    save_file(WEIGHTS, "weights.safetensors")
    for name in ("weights.pt", "weights.safetensors"):
        os.truncate(name, Path(name).stat().st_size - 20)
        assert f"{name} is not a weights file" in refused(*from_file(name))


def test_weights_of_another_model_are_refused_with_the_first_differences(refused: Refused) -> None:
    write_task()
    torch.save({**WEIGHTS, "bias": torch.zeros(7)}, "other.pt")
    assert "other.pt is from another model: bias has shape (7,) instead of (2,)" in refused(*from_file("other.pt"))
    torch.save({"weight": WEIGHTS["weight"]}, "part.pt")
    assert "part.pt is from another model: missing keys: bias" in refused(*from_file("part.pt"))


def test_weights_are_compared_with_a_model_that_needs_numbers_to_be_built(refused: Refused) -> None:
    write_task(model="nn.Linear(4, int(torch.ones(2).sum()))")
    torch.save({**WEIGHTS, "bias": torch.zeros(7)}, "other.pt")
    assert "other.pt is from another model: bias has shape (7,) instead of (2,)" in refused(*from_file("other.pt"))


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("", "weights loaded; optimizer and data start from the beginning"),
        ("module.", "stripped 'module.' from parameter names"),
        ("_orig_mod.", "stripped '_orig_mod.' from parameter names"),
        ("module._orig_mod.", "stripped '_orig_mod.' and 'module.' from parameter names"),
        ("_orig_mod.module.", "stripped '_orig_mod.' and 'module.' from parameter names"),
    ],
)
def test_wrapped_weights_are_loaded_and_what_was_stripped_is_said(
    evenstep: Callable[..., Ended], prefix: str, said: str
) -> None:
    write_task()
    torch.save({f"{prefix}{name}": value for name, value in WEIGHTS.items()}, "weights.pt")
    ended = evenstep(*from_file("weights.pt"))
    check_loaded(ended)
    assert f"weights.pt: {said}" in ended.err


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_weights_are_found_inside_a_table_of_others(evenstep: Callable[..., Ended], key: str) -> None:
    write_task()
    torch.save({"epoch": 3, key: WEIGHTS}, "weights.pt")
    check_loaded(evenstep(*from_file("weights.pt")))


def test_weights_come_as_safetensors_too(evenstep: Callable[..., Ended]) -> None:
    write_task()
    save_file(WEIGHTS, "weights.safetensors")
    check_loaded(evenstep(*from_file("weights.safetensors")))


LONG = "/" + "x" * 300


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("", ""),
        (f"{LONG} is damaged", f"{shorten(LONG)} is damaged"),
        (f"it differs; start from its weights: --resume {LONG}", f"start from its weights: --resume {LONG}"),
        (f"it is over; evenstep report {LONG} writes its page", f"evenstep report {LONG} writes"),
    ],
)
def test_commands_to_copy_are_whole_and_every_error_ends_its_line(
    message: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _print_error(message)
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.endswith("\n")
    assert shown in said
